"""Meshes: what the table splits, and that decoding on eight devices of the host says what one says."""

from __future__ import annotations

import functools
import json
import math
import os
import socket
import subprocess
import sys
from typing import Any

import jax
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jaxspec.commands.bench.pair import check_rows
from jaxspec.configs.gemma4 import PRESETS as TARGET_PRESETS
from jaxspec.mesh import CACHE_AXES, MESH_AXES, partition
from jaxspec.models.gemma4 import Gemma4
from jaxspec.weights.define import random_drafter
from jaxspec.weights.model_def import ModelDef
from jaxspec.weights.sharding import make_mesh, parse_mesh, place
from tests.cases import slow
from tests.conftest import FAST_COMPILE
from tests.tiny import FEATURE_SETS

SPLITS = ((1, 8), (2, 4), (4, 2), (8, 1))


def abstract(data: int, model: int) -> Any:
    return AbstractMesh((data, model), MESH_AXES)


# --- the table ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "shape", "model", "expected"),
    [
        (CACHE_AXES, (4, 16, 64, 256), 8, ("data", "model")),
        (CACHE_AXES, (4, 4, 64, 512), 8, ("data",)),  # 4 heads for 8 devices: whole on each
        (CACHE_AXES, (3, 16, 64, 256), 8, (None, "model")),  # 3 rows do not divide by data=2
        (("inputs", "kv_heads", None, None), (64, 16, 4, 256), 8, (None, "model")),
        (("inputs", "kv_heads", None, None), (64, 4, 10, 512), 8, ("model",)),
        (("inputs", "kv_heads", "query_groups", None), (64, 2, 8, 512), 8, (None, None, "model")),
        (("kv_heads", "query_groups", "inputs", None), (4, 8, 512, 64), 8, (None, "model")),
        (("kv_heads", "query_groups", "inputs", None), (1, 4, 32, 64), 8, (None, None, "model")),
        (("inputs", None, "mlp"), (64, 2, 128), 8, (None, None, "model")),
        (("inputs", None, "mlp"), (64, 2, 46), 8, ("model",)),
        (("experts",), (128, 64, 2, 24), 8, ("model",)),
        (("experts",), (12, 64, 2, 24), 8, ()),
        ((), (64,), 8, ()),
    ],
)
def test_one_axis_of_an_array_is_split(axes, shape, model, expected):
    padded = PartitionSpec(*expected, *[None] * (len(shape) - len(expected)))
    assert partition(axes, shape, abstract(2, model)) == padded


@pytest.mark.parametrize("model", [2, 4, 8])
@pytest.mark.parametrize("preset", TARGET_PRESETS)
def test_nearly_all_of_every_released_size_is_split(preset, model):
    """What is whole on every device is at most 2% of a target; and every matrix that is much is split."""
    drafters = [random_drafter(preset, kind, "bfloat16")[0] for kind in ("dflash", "mtp")]
    for model_def in (ModelDef(Gemma4, TARGET_PRESETS[preset], "bfloat16"), *drafters):
        shardings = model_def.shardings(abstract(1, model))
        whole = total = 0
        for name, a in model_def.abstract_params().items():
            total += a.size
            if math.prod(shardings[name].shard_shape(a.shape)) == a.size:
                whole += a.size
                with_centroids = name == "head"  # only some of its rows are read
                assert a.size < 30e6 or with_centroids, f"{name} {a.shape} is whole"
        if model_def.module is Gemma4:
            assert whole < 0.02 * total


# --- mistakes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows=2", "no axis 'rows'; the axes are data and model"),
        ("data", "data needs a size, as in data=2,model=4"),
        ("data=2,data=2", "names data twice"),
        ("data=0,model=1", "both must be 1 or more"),
        ("data=2,model=4", "mesh data=2,model=4 is 8 devices, but there "),
    ],
)
def test_meshes_that_cannot_be(text, message):
    with pytest.raises(ValueError, match=message):
        parse_mesh(text)


def test_rows_that_do_not_divide():
    with pytest.raises(ValueError, match="--batch-size 3 does not divide by data=2"):
        check_rows([2, 3], 2)


def test_one_device_is_a_mesh():
    mesh = make_mesh(devices=jax.devices()[:1])
    assert dict(mesh.shape) == {"data": 1, "model": 1}


# --- eight devices -----------------------------------------------------------------------------------


def start(*cases: str, devices: int = 8) -> subprocess.Popen:
    """Start a process of its own with so many devices, and the compiler options of `conftest`."""
    flags = f"{FAST_COMPILE} --xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.tools.eight_devices", *cases]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen) -> dict[str, dict[str, Any]]:
    out, errors = process.communicate(timeout=1200)
    assert process.returncode == 0, errors[-4000:]
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return {line.pop("case"): line for line in lines}


PAGES = "pages:31b:mtp:2:1:ahead"
DEFAULT = ("split:26b-a4b:dflash:2:4",)
ALL = [
    f"split:{name}:{drafter}:{data}:{model}"
    for name in FEATURE_SETS
    for drafter in ("dflash", "mtp")
    for data, model in SPLITS
]
ALONE = ("split:qwen3-untied:dflash:2:4", "split:26b-a4b:mixed:2:4")
REST = [case for case in ALL if case not in DEFAULT]


@functools.cache
def results(cases: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Run cases in one process: starting one takes longer than many cases do."""
    return finish(start(*cases))


def result(case: str) -> dict[str, Any]:
    if case in REST:
        return results(tuple(c for c in REST if c.split(":")[1] == case.split(":")[1]))[case]
    more = (
        "kernels:31b:plain:2:2",
        PAGES,
        "mixed_passes:26b-a4b:dflash:2",
        "grammars:2:4:mixed",
        "load",
        "cli",
        "errors",
        "sampler",
        "control",
        "products:int4",
    )
    return results((*DEFAULT, *more))[case]


@pytest.mark.slow
def test_an_engine_on_a_mesh_neither_hangs_nor_fails_under_load():
    """The caller runs programs of its own between steps. `tests.tools.soak` does it for longer, on GPUs too."""
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.tools.soak", "--mesh=data=2,model=2", "--calls=300"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout)
    assert found["done"] > 100
    assert found["prefix_hits"] > 0


@pytest.mark.parametrize("case", [*DEFAULT, *slow(*REST, *ALONE)])
def test_a_mesh_says_what_one_device_says(case):
    """Greedy tokens and sampled ones, in float32; states stay where they belong; weights are not gathered.

    Heads of keys and values that do not divide: of e2b, one with a group of four, for 8 devices (split by
    inputs); of 26b-a4b, two for 4 (queries by group); of 31b, two for 2, do.
    """
    size, drafter, data, model = case.split(":")[1:]
    found = results((case,))[case] if case in ALONE else result(case)
    assert found["equal"]
    assert found["equal_sampled"]
    assert found["misplaced"] == []
    assert found["gathers"] == []
    if drafter == "mixed":  # rows that accept unequal numbers of drafts
        assert found["most_accepted"] > 1
        return
    sums, gathers = (found["collectives"].pop(kind) for kind in ("all-reduce", "all-gather"))
    assert set(found["collectives"].values()) == {0}
    # Top-k of centroids is not split by rows, a draft.
    by_centroids = drafter == "mtp" and size.startswith("e") and data != "1"
    assert gathers <= (4 if by_centroids else 0)
    if model == "1":  # whether any row is alive, or is sampled: nothing of the models themselves
        assert sums <= 3


@pytest.mark.parametrize(
    "case",
    [
        "kernels:31b:plain:2:2",
        *slow("kernels:31b:dflash:2:2", "kernels:e2b:mtp:1:2", "kernels:26b-a4b:plain:1:2"),
    ],
)
def test_kernels_on_a_mesh_say_what_references_on_one_device_say(case):
    """Each device runs them on its own heads and rows; a key/value head that is not split has half of its queries."""
    found = result(case) if case == "kernels:31b:plain:2:2" else results((case,))[case]
    of_experts = ["experts"] if "26b" in case else []
    kernels = ["add_norm", "attention", *of_experts, "qkv"]
    assert found == {"equal": True, "interpreted": kernels}


@pytest.mark.parametrize(
    "case",
    [
        PAGES,
        *slow(
            "pages:31b:mtp:2:1:few",
            "pages:e2b:mtp:2:2:stored",
            "pages:31b:mtp:2:1:host",
            *(f"pages:26b-a4b:dflash:2:2:{kind}" for kind in ("few", "ahead", "stored")),
            *(f"pages:26b-a4b:mixed:4:1:{kind}" for kind in ("few", "stored")),
        ),
    ],
)
def test_pages_where_rows_are_split_give_what_whole_rows_on_one_device_give(case):
    """Rows stay in their part, also those that give up their pages there, are read ahead, or share a prefix.

    No page is lost, none is sent to another device, and memory is what was counted.
    """
    found = result(case) if case == PAGES else results((case,))[case]
    data, _, kind = case.split(":")[3:]
    assert found["equal"]
    assert not found["lost"]
    assert found["gathers"] == []
    assert found["bytes"] == 0
    assert found["parts"] == list(range(int(data)))
    assert (found["preempted"] >= 2) == (kind in ("few", "ahead"))
    assert (found["hit_tokens"] > 0) == (kind in ("stored", "host"))
    assert (found["host_hits"] > 0) == (kind == "host")
    assert found["ahead"] == {"few": 0, "ahead": 4}.get(kind, int(data))
    if kind == "host":  # it was warmed up, and is again
        assert found["compiled"] == 0
        assert found["entries"][0] > 0 == found["entries"][1]


@pytest.mark.parametrize(
    "how",
    [
        "26b-a4b:dflash:2",
        *slow("26b-a4b:dflash:4", "26b-a4b:mtp:4", "31b:plain:2", "e2b:mtp:2", "e4b:dflash:4"),
    ],
)
def test_rows_on_a_mesh_decode_in_passes_over_prompts(how):
    """The tokens and acceptance lengths of passes apart on one device; no weight is gathered."""
    case = f"mixed_passes:{how}"
    found = result(case) if how == "26b-a4b:dflash:2" else results((case,))[case]
    assert found == {"equal": True, "mixed": True, "misplaced": [], "gathers": []}


@pytest.mark.parametrize("format", ["int4", *slow("int8", "fp8", "fp8-dynamic", "nvfp4")])
def test_products_with_codes_on_a_mesh_are_those_on_one_device(format):
    """Sums of float32 in another order; a format that rounds activations rounds them first."""
    case = f"products:{format}"
    found = result(case) if format == "int4" else results((case,))[case]
    assert {name: apart for name, apart in found.items() if apart > 2e-6} == {}
    assert len(found) == 8


@pytest.mark.parametrize("drafter", slow("plain", "dflash"))
def test_images_on_a_mesh_are_those_on_one_device(drafter):
    case = f"images:2:4:{drafter}"
    assert results((case,))[case] == {"equal": True, "seen": True}


@pytest.mark.parametrize("how", ["2:4:mixed", *slow("1:2:mtp", "4:1:dflash")])
def test_rows_on_a_mesh_keep_to_their_grammars(how):
    """Each device asks for its own rows; those that hold the same rows get one answer."""
    case = f"grammars:{how}"
    found = result(case) if how == "2:4:mixed" else results((case,))[case]
    data, model = map(int, how.split(":")[:2])
    assert found == {"equal": True, "errors": [], "rows": [8 // data], "asked": model}


def test_a_gather_of_a_weight_would_be_seen():
    assert result("control")["flat"]
    assert not result("control")["ours"]


def test_weights_go_straight_to_their_devices():
    """Random ones, an Orbax directory, and Hugging Face's layout: only shards, with the same numbers."""
    assert result("load")["wrong"] == []


def test_generate_on_a_mesh():
    found = result("cli")
    assert found["code"] == 0
    assert found["equal"]
    assert found["meshes"] == [{"data": 2, "model": 4}, {"data": 1, "model": 1}]
    assert found["errors"] == {
        "rows=8": [2, "error: --mesh 'rows=8': no axis 'rows'; the axes are data and model\n"],
        "data=3,model=2": [
            2,
            "error: --mesh data=3,model=2 is 6 devices, but there are 8 (cpu)\n",
        ],
    }


@pytest.mark.slow  # most of a minute
def test_check_on_a_mesh():
    """It counts the same drafts, and finds the same of other readings."""
    found = results(("check",))["check"]
    assert found["codes"] == [True, True]
    assert found["first"] > 0.3
    assert found["apart"] < 0.05  # sums in another order: a draft may change
    assert found["tried"] == [["feature layers reversed", "mask id 1"]] * 2


def test_a_sampler_runs_where_the_weights_are():
    assert result("sampler") == {"equal": True, "near": True, "devices": 8}


@pytest.mark.slow
def test_samplers_of_split_and_of_whole_weights_have_programs_of_their_own():
    """A second sampler, whose weights were whole on each device, ran into the first one's program."""
    assert results(("whole",))["whole"] == {"sampler": True, "engine": True}


@pytest.mark.slow
def test_rows_take_turns_on_any_mesh():
    found = finish(start("turns"))["turns"]
    assert found == {"mesh": True, "explicit": True, "mapped": True}


@pytest.mark.slow
def test_a_sampler_runs_inside_programs_of_any_mesh():
    """Explicit axes were refused by JAX deep inside the model, and so were loops under shard_map."""
    assert results(("inside", "moved"))["inside"] == {"explicit": True, "mapped": True, "spread": 8}


@pytest.mark.slow  # training/test_mesh trains on a mesh, rollout/test_sampler is called under some
def test_weights_on_meshes_of_training_programs():
    """Explicit axes and axes of size 1 are taken; a split over another axis is refused with the call that helps."""
    found = results(("training_meshes",))["training_meshes"]
    refused = found.pop("refused")
    assert "is on a mesh with axes data, fsdp, model; expected data and model" in refused
    assert "jaxspec.place_params(target_params, target.model_def, mesh)" in refused
    assert found == {name: [True, True] for name in ("explicit", "an axis of 1", "fsdp")}


@pytest.mark.slow
def test_weights_move_from_a_training_mesh_by_one_call():
    assert results(("inside", "moved"))["moved"] == {
        "split before": True,
        "misplaced": [],
        "equal": True,
    }


def test_keys_of_rows_can_be_placed():
    """They have no form on the host."""
    keys = jax.random.split(jax.random.key(3), 2)
    mesh = make_mesh(devices=jax.devices()[:1])
    placed = place(keys, NamedSharding(mesh, PartitionSpec("data")))
    assert placed.sharding.mesh == mesh
    assert (jax.random.key_data(placed) == jax.random.key_data(keys)).all()


def test_weights_that_are_not_on_one_mesh():
    found = result("errors")
    assert "target final_norm on mesh data=1,model=1" in found["mixed"]
    assert "on mesh data=4,model=2" in found["drafter"]
    assert "Load all with the same mesh" in found["drafter"]
    assert "is on a mesh with axes x; expected data and model" in found["foreign"]
    refused = (
        "holds no whole request in each of 2 parts of the slots, which may need cache_length=640"
    )
    assert found["pages"] == f"cache_tokens=1279 {refused}; give 1280 or more"
    assert found["ahead"] == 4
    assert found["rows"] == [2, 2, 4, 8, 48]  # multiples of data=2; on a CPU, 24 each for 23


@pytest.mark.slow  # most of a minute
@pytest.mark.parametrize(("data", "model"), [(2, 4), (1, 8)])
def test_two_processes_say_what_one_device_says(data, model):
    """Rows or weights are spread over both; neither process sees all shards, and each sees all tokens."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    pair = [start(f"two:{port}:{i}:{data}:{model}", devices=4) for i in range(2)]
    try:
        found = [next(iter(finish(process).values())) for process in pair]
    finally:
        for process in pair:
            process.kill()
    assert found == [{"equal": True, "processes": 2, "misplaced": []}] * 2
