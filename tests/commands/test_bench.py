"""The benchmark's arithmetic against published numbers, and its report from a run on the CPU. Nothing is timed here."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from jax.sharding import Mesh
from rich.console import Console
from typer.testing import CliRunner

import jaxspec
from jaxspec import decode
from jaxspec import state as states
from jaxspec.commands import output
from jaxspec.commands.bench import floor, plot, profile, results, run
from jaxspec.commands.bench import measure as measuring
from jaxspec.commands.bench import pair as pairs
from jaxspec.commands.bench.command import bench_command
from jaxspec.commands.bench.floor import Ceiling, StepCost, expected_experts, share_of_group
from jaxspec.commands.bench.measure import measure
from jaxspec.commands.bench.options import BenchOptions
from jaxspec.commands.bench.pair import ModelPair, make_pair
from jaxspec.commands.models import ModelOptions
from jaxspec.commands.options import UsageError
from jaxspec.configs.dflash import DFlashConfig
from jaxspec.configs.gemma4 import PRESETS as TARGET_PRESETS
from jaxspec.configs.mtp import PRESETS as MTP_PRESETS
from jaxspec.configs.mtp import MTPConfig
from jaxspec.decode_loop import decode_loop
from jaxspec.drafters.dflash import DFlashDrafter
from jaxspec.drafters.mtp import MTPDrafter
from jaxspec.mesh import MESH_AXES
from jaxspec.models.gemma4 import Gemma4
from jaxspec.options import Drafting, ProgramFeatures, Sampling, Tree
from jaxspec.runtime import memory
from jaxspec.runtime.runtime import Runtime
from jaxspec.shapes import Params
from jaxspec.state import DecodeSpec
from jaxspec.weights import memory as weight_memory
from jaxspec.weights.define import formats_for, random_drafter
from jaxspec.weights.model_def import ModelDef
from jaxspec.weights.sharding import make_mesh
from tests import tiny

H200 = Ceiling(bytes_per_s=3.85e12, flops_per_s=790e12)
A_TREE = ["--tree-topk", "3", "--tree-depth", "5", "--num-draft-tokens", "11"]


def spec(preset: str, *, drafter: bool = False) -> DecodeSpec:
    target = ModelDef(Gemma4, TARGET_PRESETS[preset], "bfloat16")
    if not drafter:
        return DecodeSpec(target, None)
    model_def, _ = random_drafter(preset, "dflash", "bfloat16")
    return DecodeSpec(target, model_def, Drafting(model_def.config.block_size - 1))


def mtp(preset: str, drafts: int, tree: Tree | None = None) -> DecodeSpec:
    drafter, _ = random_drafter(preset, "mtp", "bfloat16")
    return DecodeSpec(spec(preset).target, drafter, Drafting(drafts, tree))


@pytest.mark.parametrize(
    ("preset", "billions"),
    [("e2b", 4.629), ("e4b", 7.463), ("12b", 11.907), ("26b-a4b", 25.233), ("31b", 30.697)],
)
def test_presets_have_the_released_number_of_text_parameters(preset: str, billions: float) -> None:
    sizes = [a.size for a in spec(preset).target.abstract_params().values()]
    assert sum(sizes) / 1e9 == pytest.approx(billions, abs=5e-4)


def test_a_dense_target_reads_every_weight_once_a_step() -> None:
    cost = floor.step_cost(spec("31b"), batch=1, context=256)
    assert cost.weight_bytes == pytest.approx(2 * 30.697e9, rel=1e-4)
    assert cost.flops == pytest.approx(2 * 30.697e9, rel=0.02)  # attention adds a little


def test_tables_that_are_looked_up_cost_their_rows() -> None:
    """E2B is 4.63B parameters, but 2.35B of them are the per-layer table: a step reads one row of it."""
    config = TARGET_PRESETS["e2b"]
    table = config.per_layer_vocab_size * config.num_layers * config.per_layer_input_size
    cost = floor.step_cost(spec("e2b"), batch=1, context=256)
    assert cost.weight_bytes == pytest.approx(2 * (4.6286e9 - table), rel=1e-3)


def test_experts_cost_what_routing_reaches() -> None:
    config = TARGET_PRESETS["26b-a4b"]
    assert expected_experts(config, 1) == pytest.approx(8)
    assert expected_experts(config, 16) == pytest.approx(82, abs=0.5)
    assert expected_experts(config, 512) == pytest.approx(128)
    one, many = (floor.step_cost(spec("26b-a4b"), batch, 256) for batch in (1, 32))
    experts = 30 * 3 * 2816 * 704 * 2  # bytes of one expert in all layers
    expected = (expected_experts(config, 32) - 8) * experts
    assert many.weight_bytes - one.weight_bytes == pytest.approx(expected)


@pytest.mark.parametrize(
    ("preset", "teraflops", "megabytes"),
    [("e4b", 1.077, 2 * 169.4), ("12b", 0.0231, 2 * 49.9), ("26b-a4b", 3.543, 2 * 572.7)],
)
def test_an_image_costs_what_its_patches_take(
    preset: str, teraflops: float, megabytes: float
) -> None:
    """An image of 280 tokens has 2,520 patches, or 280 of 12B. Of positions it reads its own."""
    vision = pairs.model_def_of(pairs.vision_presets()[preset], "bfloat16")
    cost = floor.image_cost(vision, 280)
    assert cost.flops / 1e12 == pytest.approx(teraflops, rel=1e-3)
    config = vision.config
    patches = 280 * config.pool_size**2
    unread = 2 * 2 * (config.num_positions - patches) * config.hidden_size
    assert cost.weight_bytes / 1e6 == pytest.approx(megabytes - unread / 1e6, rel=2e-3)
    double = floor.image_cost(vision, 560).flops
    assert double > 2 * cost.flops if config.num_layers else double == 2 * cost.flops


def test_products_of_8_bit_floats_count_half() -> None:
    """Tables and experts round weights only, so all of their operations count."""
    plain, tables = 2 * 29.29e9, 2 * 1.41e9
    for format, wanted in (("fp8", plain + tables), ("fp8-dynamic", plain / 2 + tables)):
        model_def = spec("31b").target
        target = model_def.with_formats(formats_for(model_def, linears=format))
        cost = floor.step_cost(DecodeSpec(target, None), batch=1, context=256)
        assert cost.flops == pytest.approx(wanted, rel=0.02)  # attention adds a little
        assert cost.weight_bytes == pytest.approx(32.1e9, rel=0.01)


def test_keys_and_values_stop_growing_at_the_window() -> None:
    def kv(context: int) -> float:
        return floor.step_cost(spec("31b"), batch=1, context=context).kv_bytes

    sliding, full = 50 * 16 * 256, 10 * 4 * 512  # layers, kv heads, head dim
    assert kv(99) == 2 * 2 * 100 * (sliding + full)
    assert kv(5999) == 2 * 2 * (1024 * sliding + 6000 * full)


@pytest.mark.parametrize(
    ("preset", "batch", "drafter", "milliseconds"),
    [
        ("31b", 1, False, 15.9),
        ("31b", 1, True, 17.5),
        ("31b", 32, True, 44),
        ("26b-a4b", 1, True, 9.5),
    ],
)
def test_floors_of_an_h200(preset: str, batch: int, drafter: bool, milliseconds: float) -> None:
    floor_s = floor.step_floor_s(spec(preset, drafter=drafter), batch, 384, H200)
    assert floor_s * 1e3 == pytest.approx(milliseconds, rel=0.02)


def test_the_floor_of_a_stream_is_arithmetic_of_prompts_and_steps_of_full_slots() -> None:
    """A prompt has logits for one token. A drafter shortens the stream by what a step commits."""
    pair = spec("31b")
    requests = [(100, 40), (300, 24)]
    steps_s = 8 * floor.step_floor_s(pair, 8, 216, H200)
    assert pair.target.head is not None
    head = pair.target.abstract_params()[pair.target.head]
    numbers = sum(math.prod(a.shape) for a in pair.target.abstract_params().values())
    least = 2 * 400 * (numbers - math.prod(head.shape)) / H200.flops_per_s
    found = floor.stream_floor_s(pair, 8, requests, H200)
    assert found is not None
    assert least < found - steps_s < 1.02 * least
    twice = floor.stream_floor_s(pair, 8, 2 * requests, H200, groups=2)
    assert twice == pytest.approx(found)  # each group takes half of them
    drafting = spec("31b", drafter=True)
    assert floor.stream_floor_s(drafting, 8, requests, H200) is None
    drafting = dataclasses.replace(drafting, drafting=Drafting(15, synthetic_acceptance=4))
    two_steps_s = 2 * floor.step_floor_s(drafting, 8, 216, H200)
    assert floor.stream_floor_s(drafting, 8, requests, H200) == pytest.approx(
        found - steps_s + two_steps_s
    )


@pytest.mark.parametrize("preset", list(MTP_PRESETS))
def test_an_assistant_is_read_once_a_draft(preset: str) -> None:
    """Every weight, the embedding's row and the lent K/V; of a head with centroids, 4096 rows."""
    config, one = MTP_PRESETS[preset], mtp(preset, 1)
    assert one.drafter is not None
    params = one.drafter.abstract_params()
    parameters = sum(a.size for n, a in params.items() if n != "token_ordering")
    unread = 0
    if config.num_centroids:
        unread = (config.vocab_size - 4096) * config.hidden_size
    cost = floor.step_costs(one, batch=1, context=384)[1]
    order = 4 * 4096 if config.num_centroids else 0
    expected = 2 * (parameters - unread + config.backbone_hidden_size) + order
    assert cost.weight_bytes == pytest.approx(expected)
    kv = config.num_kv_heads * config.head_dim + config.full_num_kv_heads * config.full_head_dim
    assert cost.kv_bytes == 2 * 2 * 384 * kv
    seven = floor.step_costs(mtp(preset, 7), batch=1, context=384)[1]
    assert seven.weight_bytes == pytest.approx(7 * cost.weight_bytes)
    assert seven.kv_bytes == 7 * cost.kv_bytes
    assert seven.flops == pytest.approx(7 * cost.flops)


@pytest.mark.parametrize(
    ("preset", "millions"), [("e4b", 78.8), ("26b-a4b", 419.7), ("31b", 469.5)]
)
def test_assistants_have_the_released_number_of_parameters(preset: str, millions: float) -> None:
    drafter = mtp(preset, 1).drafter
    assert drafter is not None
    sizes = [a.size for a in drafter.abstract_params().values()]
    assert sum(sizes) / 1e6 == pytest.approx(millions, abs=0.05)


def test_an_assistant_sees_no_more_than_the_window_on_sliding_layers() -> None:
    def kv(context: int) -> float:
        return floor.step_costs(mtp("31b", 1), batch=1, context=context)[1].kv_bytes

    assert kv(5000) == 2 * 2 * (1024 * 16 * 256 + 5000 * 4 * 512)


def test_a_tree_takes_a_pass_a_level() -> None:
    """Five levels read the weights five times, whatever the number of nodes; wider ones cost arithmetic."""
    chain = floor.step_costs(mtp("31b", 5), 1, 384)[1]
    verify, tree = floor.step_costs(mtp("31b", 11, Tree(3, 5)), 1, 384)
    rows = 4 * 2 * 5376 * 2  # bytes of two more embeddings in four levels
    assert tree.weight_bytes == pytest.approx(chain.weight_bytes + rows)
    assert tree.kv_bytes == chain.kv_bytes
    assert tree.flops == pytest.approx(chain.flops * (1 + 4 * 3) / 5)
    assert verify == floor.step_costs(mtp("31b", 11), 1, 384)[0]  # the target takes all nodes


@pytest.mark.parametrize(
    ("preset", "drafts", "batch", "milliseconds"),
    [
        ("26b-a4b", 7, 1, 7.5),
        ("26b-a4b", 7, 8, 14.4),
        ("31b", 7, 1, 17.6),
        ("31b", 7, 32, 22),
        ("e4b", 5, 1, 2.5),
        ("e4b", 5, 32, 3.0),
    ],
)
def test_floors_of_an_h200_with_an_assistant(
    preset: str, drafts: int, batch: int, milliseconds: float
) -> None:
    floor_s = floor.step_floor_s(mtp(preset, drafts), batch, 384, H200)
    assert floor_s * 1e3 == pytest.approx(milliseconds, rel=0.03)


def test_the_ceiling_is_of_a_machine_there_is() -> None:
    ceiling = floor.measure_ceiling("float32", nbytes=4 << 20)
    assert 1e8 < ceiling.bytes_per_s < 1e13
    assert 1e8 < ceiling.flops_per_s < 1e15


def test_the_floor_is_the_slower_of_memory_and_arithmetic() -> None:
    ceiling = Ceiling(bytes_per_s=10, flops_per_s=100)
    assert StepCost(30, 10, 100).floor_s(ceiling) == 4
    assert StepCost(30, 10, 1000).floor_s(ceiling) == 10


@pytest.mark.parametrize("preset", list(TARGET_PRESETS))
def test_every_preset_gets_a_drafter_that_fits(preset: str) -> None:
    model_def, name = random_drafter(preset, "dflash", "bfloat16")
    model_def.config.check_fits(TARGET_PRESETS[preset])
    assert preset in name


def test_memory_is_weights_caches_and_logits() -> None:
    need = memory.footprint(spec("31b"), 4, 32768, make_mesh(devices=jax.devices()[:1]))
    assert need.weights == pytest.approx(2 * 30.697e9, rel=1e-4)
    ring, full = 50 * 16 * 256 * 1088, 10 * 4 * 512 * 32768  # layers, kv heads, head dim, slots
    assert need.caches == 4 * 2 * 2 * (ring + full)
    assert need.logits == round((1.05 + 2) * 4 * 4 * 262144)  # of one group of rows
    assert str(need) == "70.5 GiB a device (57.2 weights, 13.3 caches, 0.0 logits)"


def test_a_run_larger_than_the_device_is_refused_with_what_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair, mesh = DecodeSpec(ModelDef(Gemma4, tiny.config("31b"), "float32"), None), make_mesh()
    limit = memory.footprint(pair, 5, 1024, mesh).total
    monkeypatch.setattr("jaxspec.weights.memory.bytes_limit", lambda mesh: limit)
    memory.check_fits(pair, 5, 1024, mesh)
    with pytest.raises(memory.DeviceMemoryError) as refused:
        memory.check_fits(pair, 8, 1088, mesh)
    measured = re.findall(r"(\d+) rows of (\S+)", str(refused.value))
    assert [rows for rows, _ in measured] == ["4", "8"]
    longest = int(measured[1][1])
    memory.check_fits(pair, 8, longest, mesh)
    with pytest.raises(memory.DeviceMemoryError, match="8 rows with caches"):
        memory.check_fits(pair, 8, longest + 64, mesh)
    limit = 1 << 16
    with pytest.raises(memory.DeviceMemoryError, match="not one row fits; bfloat16 halves this"):
        memory.check_fits(pair, 1, 256, mesh)
    with pytest.raises(memory.DeviceMemoryError, match="the weights need"):
        weight_memory.check_weights_fit(pair.target, mesh)


def tiny_target() -> tuple[ModelDef, Params]:
    """A sliding layer and a full one, with experts."""
    config = dataclasses.replace(tiny.config("26b-a4b"), layer_types=("sliding", "full"))
    model_def = ModelDef(Gemma4, config, "float32")
    return model_def, tiny.random_params(model_def, 0)


def tiny_pair(*, synthetic_acceptance: float | None) -> ModelPair:
    target, target_params = tiny_target()
    config = DFlashConfig(
        vocab_size=target.config.vocab_size,
        hidden_size=target.config.hidden_size,
        layer_types=("sliding", "full"),
        causal=(True, False),
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=64,
        block_size=4,
        mask_token_id=4,
        feature_layers=(0,),
        num_target_layers=target.config.num_layers,
        max_positions=4096,
        sliding_window=16,
    )
    drafter = ModelDef(DFlashDrafter, config, "float32")
    return ModelPair(
        DecodeSpec(target, drafter, Drafting(3, synthetic_acceptance=synthetic_acceptance)),
        target_params,
        tiny.random_params(drafter, 1),
        "tiny",
        "tiny DFlash",
    )


def test_devices_of_a_host_share_what_it_can_do() -> None:
    mesh = Mesh(np.array([jax.devices()[:1] * 4] * 2), MESH_AXES)
    rows, together = share_of_group(mesh, 8, H200)
    assert (rows, together.bytes_per_s) == (4, H200.bytes_per_s / 2)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Return the report of a run of plain decoding and DFlash, as it comes out of its JSON."""
    pair, text = tiny_pair(synthetic_acceptance=2.5), io.StringIO()
    prompts = pair.prompts(2, 20, 0)
    options = BenchOptions(batch_size=(2,), new_tokens=40, repeats=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "measure_ceiling", lambda *_: H200)
        values = run.run(Console(file=text, width=80), pair, prompts, options)
    return {**json.loads(json.dumps(values)), "text": text.getvalue()}


def test_report_of_a_run(report: dict[str, Any]) -> None:
    assert report["versions"].keys() == {"jaxspec", "python", "jax", "jaxlib", "flax", "numpy"}
    assert (report["dtype"], report["platform"], report["prompt_length"]) == ("float32", "cpu", 20)
    assert report["prompts"] == "random prompts of 20 tokens"
    assert max(map(len, report["text"].splitlines())) <= 80
    assert "…" not in report["text"]
    plain, speculative = report["results"]
    assert plain.keys() == {f.name for f in dataclasses.fields(results.CaseResult)}
    assert (plain["mode"], plain["steps"], plain["acceptance_length"]) == ("plain", 40, None)
    assert (plain["label"], plain["draft_ms"], plain["draft_floor_ms"]) == ("plain", None, 0)
    assert (speculative["label"], speculative["acceptance"]) == ("dflash 3", "synthetic")
    assert speculative["acceptance_length"] == pytest.approx(2.5, abs=0.4)  # 2 or 3 by chance
    assert 0 < speculative["draft_floor_ms"] < speculative["floor_ms"]
    assert 14 <= speculative["steps"] <= 20
    assert speculative["kernels_per_step"] > plain["kernels_per_step"] > 20
    for result in report["results"]:
        assert (result["batch_size"], result["context_length"]) == (2, None)
        for spread in (result["step_ms"], result["verify_ms"], result["tpot_ms"]):
            assert 0 < spread["min"] <= spread["median"] <= spread["max"]
        parts = result["verify_ms"]["median"] + result["rest_ms"]
        parts += result["draft_ms"]["median"] if result["draft_ms"] else 0
        assert parts == pytest.approx(result["step_ms"]["median"])
        assert result["footprint"]["caches"] > 0
        experts = result["distinct_experts"]
        assert 3 <= experts["min"] <= experts["median"] <= experts["max"] <= 8


def test_whole_steps_alone() -> None:
    """Are the drafter's, without plain decoding beside it and without the parts of a step."""
    pair, text = tiny_pair(synthetic_acceptance=2.5), io.StringIO()
    options = BenchOptions(batch_size=(2,), new_tokens=10, repeats=1, steps_only=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "measure_ceiling", lambda *_: H200)
        prompts = pair.prompts(2, 20, 0)
        report = run.run(Console(file=text, width=80), pair, prompts, options)
    (result,) = report["results"]
    assert (result["mode"], result["label"]) == ("speculative", "dflash 3")
    assert result["step_ms"]["median"] > 0
    assert result["acceptance_length"] == pytest.approx(2.5, abs=0.8)
    assert [result[name] for name in ("draft_ms", "verify_ms", "rest_ms")] == [None] * 3
    assert "speedup" not in text.getvalue()


def test_seconds_to_the_first_token_are_added_up(report: dict[str, Any]) -> None:
    first = report["results"][0] | {"prefill_compile_s": 3.0, "ttft_ms": {"median": 250.0}}
    startup = run.startup_of(first, import_s=2.0, load_s=4.0)
    assert startup["first_token_s"] == 9.25
    assert ": 9.2 to the first token" in run.described_startup(startup)
    unknown = run.startup_of(first | {"ttft_ms": None}, import_s=None, load_s=4.0)
    assert unknown["first_token_s"] is None
    assert run.described_startup(unknown).startswith("seconds: 4.0 weights, 3.0 compiling")


def test_a_report_can_be_drawn(report: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "steps.png"
    output.check_picture(path)
    plot.draw(report, path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("slower", "words"), [(1.5, "even at 1.50"), (9.0, "never even")])
def test_the_picture_says_whether_drafting_can_pay_and_what_floors_are(
    report: dict[str, Any], tmp_path: Path, slower: float, words: str
) -> None:
    """A step of 3 drafts commits 4 tokens at most, so one that takes 9 plain steps never pays."""
    matplotlib = pytest.importorskip("matplotlib")
    plain, drafted = copy.deepcopy(report["results"])
    drafted["step_ms"]["median"] = slower * plain["step_ms"]["median"]
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        plot.draw({**report, "results": [plain, drafted]}, tmp_path / "steps.svg")
    text = (tmp_path / "steps.svg").read_text()
    assert f"plain, {words}" in text
    assert "floor: the least time that a step can take" in text


def test_a_picture_that_cannot_be_drawn_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"ends in \.png"):
        output.check_picture(tmp_path / "steps.txt")
    with pytest.raises(ValueError, match="there is no directory"):
        output.check_picture(tmp_path / "none" / "steps.png")
    monkeypatch.setattr(output.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"jaxspec-decoding\[plot\]"):
        output.check_picture(tmp_path / "steps.png")


A_LOOP = """HloModule jit_loop, is_scheduled=true

%fused (p.1: f32[4]) -> f32[4] {
  %p.1 = f32[4]{0} parameter(0)
  ROOT %e.1 = f32[4]{0} exponential(%p.1)
}

%inner (p.2: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p.2 = (s32[], f32[4]{0}) parameter(0)
  %g.2 = f32[4]{0} get-tuple-element(%p.2), index=1
  %f.2 = f32[4]{0} fusion(%g.2), kind=kLoop, calls=%fused
  ROOT %t.2 = (s32[], f32[4]{0}) tuple(%g.2, %f.2)
}

%body.2 (p.4: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p.4 = (s32[], f32[4]{0}) parameter(0)
  %x.4 = (s32[], f32[4]{0}) call(%p.4), to_apply=%inner
  ROOT %v.4 = (s32[], f32[4]{0}) while(%x.4), condition=%cond, body=%inner
}

%body (p.3: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p.3 = (s32[], /*index=1*/f32[4]{0}) parameter(0)
  %c.3 = s32[] constant(1)
  %d.3 = (f32[4]{0}, s8[64]{0}) custom-call(%p.3), custom_call_target="__cublas$gemm"
  %a.3 = ((f32[4]{0}), f32[4]{0}, u32[]) copy-start(%p.3)
  %b.3 = f32[4]{0} copy-done(%a.3)
  %w.3 = (s32[], f32[4]{0}) while(%p.3), condition=%cond, body=%inner, backend_config={"known_trip_count":{"n":"7"}}
  %i.3 = (s32[], f32[4]{0}) conditional(%c.3, %w.3, %w.3), branch_computations={%inner, %body.2}
  ROOT %v.3 = (s32[], f32[4]{0}) while(%i.3), condition=%cond, body=%inner
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %p = (s32[], f32[4]{0}) parameter(0)
  %copy = f32[4]{0} copy(%p)
  ROOT %w = (s32[], f32[4]{0}) while(%p), condition=%cond, body=%body
}
"""


def test_kernels_and_round_trips_of_a_loop() -> None:
    """A library call, a copy, seven rounds of a fusion, the smaller branch, a loop that the host follows."""
    counts = profile.loop_counts(A_LOOP)
    assert counts == profile.LoopCounts(kernels=1 + 1 + 7 + 1 + 1, host_round_trips=2)
    sampled = profile.loop_counts(A_LOOP, sampled=True)
    assert sampled.kernels == 1 + 1 + 7 + 2 + 1  # the branch that has a loop in a loop
    with pytest.raises(ValueError, match="no loop"):
        profile.loop_counts(A_LOOP.replace("while(", "call("))


A_MESH_LOOP = """HloModule m

%body (p.3: (s32[], bf16[8,512])) -> (s32[], bf16[8,512]) {
  %p.3 = (s32[], bf16[8,512]{1,0}) parameter(0)
  %a.3 = bf16[8,512]{1,0} all-reduce(%p.3), to_apply=%add
  %s.3 = ((bf16[8,512]{1,0}), bf16[8,512]{1,0}) all-reduce-start(%a.3), to_apply=%add
  %d.3 = bf16[8,512]{1,0} all-reduce-done(%s.3)
  %c.3 = (s8[4]{0}, s8[4]{0}, u32[], u32[]) collective-permute-start(%d.3)
  %e.3 = s8[4]{0} collective-permute-done(%c.3)
  %g.3 = (f32[2,4]{1,0}, pred[16]{0}) all-gather(%e.3), dimensions={0}
  ROOT %t.3 = (s32[], bf16[8,512]{1,0}) tuple(%g.3, %d.3)
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %p = (s32[], bf16[8,512]{1,0}) parameter(0)
  ROOT %w = (s32[], bf16[8,512]{1,0}) while(%p), condition=%cond, body=%body
}
"""


def test_exchanges_between_devices_are_counted_with_their_bytes() -> None:
    counts = profile.loop_counts(A_MESH_LOOP)
    assert counts == profile.LoopCounts(4, 1, 4, 2 * 8 * 512 * 2 + 4 + 2 * 4 * 4 + 16)


def test_rows_sample_as_asked_and_the_report_says_so() -> None:
    asked = Sampling(temperature=0.8, top_k=40, repetition_penalty=1.1)
    program_features = ProgramFeatures.wanted_by([asked])
    pair = tiny_pair(synthetic_acceptance=None)
    spec = dataclasses.replace(
        pair.spec, program_features=program_features, drafter=None, drafting=Drafting()
    )
    runtime = Runtime(spec, pair.target_params, None, batch_size=2, cache_length=64)
    rows = measuring.admission_of(runtime, 9, 0, asked).sampling
    assert rows["temperature"].tolist() == pytest.approx([0.8, 0.8])
    assert rows["top_k"].tolist() == [40, 40]
    assert rows["repetition_penalty"].tolist() == pytest.approx([1.1, 1.1])
    assert run.described(asked) == "temperature 0.8, top-k 40, repetition-penalty 1.1"
    assert run.described(Sampling()) == "greedy"


def test_prompts_have_the_length_that_was_asked_for() -> None:
    """A longer one than the held-out prompts was clipped without a word."""
    held_out = ((2, 5, 6, 7), (2, 8, 9))
    pair = dataclasses.replace(tiny_pair(synthetic_acceptance=None), held_out=held_out)
    assert pair.prompts(2, None, 0).tolist() == [[2, 5, 6], [2, 8, 9]]
    assert pair.prompts(1, 2, 0).tolist() == [[2, 5]]
    with pytest.raises(UsageError, match=r"--prompt-length 4: .* have 3 tokens"):
        pair.prompts(2, 4, 0)
    assert tiny_pair(synthetic_acceptance=None).prompts(1, None, 0).shape == (1, 256)


def mtp_tree() -> ModelPair:
    target, target_params = tiny_target()
    config = MTPConfig.from_hf(tiny.hf_assistant_config("26b-a4b"))
    drafter = ModelDef(MTPDrafter, config, "float32")
    spec = DecodeSpec(target, drafter, Drafting(5, Tree(2, 3)))
    sampling = Sampling(temperature=0.7, top_k=3)
    params = tiny.random_params(drafter, 1)
    return ModelPair(spec, target_params, params, "tiny", "tiny MTP", sampling=sampling)


def test_a_case_starts_within_a_context_that_was_never_prefilled() -> None:
    """With a tree, sampled: experts are counted over all its nodes, and acceptance is real unless asked."""
    pair = mtp_tree()
    result = measure(pair, pair.prompts(1, 1, 0), H200, new_tokens=6, repeats=1, seed=0, context=90)
    assert (result.context_length, result.ttft_ms, result.cache_length) == (90, None, 128)
    assert (result.label, result.acceptance) == ("mtp tree 5", "real")
    assert result.acceptance_length is not None
    assert 1 <= result.acceptance_length <= 4
    assert 2 <= result.steps <= 6
    assert result.distinct_experts is not None
    assert 3 <= result.distinct_experts.min <= result.distinct_experts.max <= 8
    assert "a tree of topk 2 and depth 3" in pair.title
    longer = floor.step_cost(pair.spec, 1, 93)
    assert result.cost == longer


def test_random_caches_are_as_norms_leave_them() -> None:
    spec = tiny_pair(synthetic_acceptance=None).spec
    empty = states.init_state(
        spec, 2, cache_length=64, num_stop_ids=1, cache_dtype=jnp.dtype("float32")
    )
    filled = measuring.with_random_caches(empty, 0)
    for x in jax.tree.leaves((filled.caches, filled.drafter)):
        assert np.std(x) == pytest.approx(1, abs=0.1)
    state = measuring.stand_after(40, jnp.asarray([3, 4]), filled)
    assert state.lengths.tolist() == [40, 40]
    assert state.tokens[:, 0].tolist() == state.anchors.tolist() == [3, 4]
    assert state.active.all()


def in_order(model_def: ModelDef, seed: int, shardings: object = None) -> Params:
    """Return weights as `ModelDef.random_params` does, its tokens in order, but compile nothing."""
    params = tiny.random_params(model_def, seed)
    if "token_ordering" in params:
        params["token_ordering"] = jnp.sort(params["token_ordering"])
    return params


def test_random_weights_come_with_the_asked_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    config = MTPConfig.from_hf(tiny.hf_assistant_config("e4b"))
    monkeypatch.setitem(TARGET_PRESETS, "e4b", tiny.config("e4b"))
    monkeypatch.setitem(MTP_PRESETS, "e4b", config)
    monkeypatch.setattr(ModelDef, "random_params", in_order)
    pair = make_pair(ModelOptions(drafter="mtp", dtype="float32"), Drafting(), "e4b")
    assert pair.drafter_name == "MTP of e4b, random weights"
    assert pair.spec.num_draft_tokens == config.num_draft_tokens
    assert pair.drafter_params is not None
    ordering = np.asarray(pair.drafter_params["token_ordering"])
    assert sorted(ordering) == list(range(config.vocab_size))
    assert not np.array_equal(ordering, np.arange(config.vocab_size))
    plain = ModelOptions(drafter="none", dtype="float32")
    assert make_pair(plain, Drafting(), "e4b").spec.drafter is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "kind", "drafts"),
    [
        ("26b-a4b", "dflash", 15),
        ("26b-a4b", "mtp", 7),
        ("e2b", "mtp", 5),
        ("e4b", "mtp", 5),
        ("31b", "dflash", 15),
        ("31b", "mtp", 7),
    ],
)
def test_released_shapes_can_be_measured(
    preset: str, kind: str, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced, not run: no weights of that size are made."""

    def zeros(model_def: ModelDef, *_: object) -> Params:
        return {n: jnp.zeros(a.shape, a.dtype) for n, a in model_def.abstract_params().items()}

    monkeypatch.setattr(pairs, "_random_params", zeros)
    monkeypatch.setattr(pairs.memory, "check_fits", lambda *_: None)

    def traced() -> list[Any]:
        models = ModelOptions(drafter=kind, dtype="bfloat16")
        pair = make_pair(models, Drafting(drafts, synthetic_acceptance=2.5), preset)
        spec, weights = pair.spec, (pair.target_params, pair.drafter_params)
        state = states.init_state(
            spec, 8, cache_length=576, num_stop_ids=1, cache_dtype=jnp.dtype("bfloat16")
        )
        (chunk,) = measuring.chunks_of(np.zeros((8, 256), np.int32), 256)
        state = decode.prefill(spec, *weights, state, jax.device_put(chunk))
        steps, block = jnp.int32(4), (state, jnp.zeros((8, spec.step_tokens), jnp.int32))
        return [
            (decode_loop(spec, *weights, state, steps), block[1]),
            profile.draft_loop(spec, *weights, block, steps),
            profile.verify_loop(spec, *weights, block, steps),
        ]

    step, draft, verify = jax.eval_shape(traced)
    assert jax.tree.map(jnp.shape, step) == jax.tree.map(jnp.shape, draft)
    assert jax.tree.map(jnp.shape, draft) == jax.tree.map(jnp.shape, verify)


def test_a_run_larger_than_the_device_is_refused_before_its_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jaxspec.weights.memory.bytes_limit", lambda mesh: 12 << 20)

    def never(*_: object) -> Params:
        raise AssertionError("weights were made")

    monkeypatch.setattr(pairs, "_random_params", never)
    plain = ModelOptions(drafter="none", dtype="bfloat16")
    with pytest.raises(memory.DeviceMemoryError, match="8 rows with caches of 128 positions need"):
        make_pair(plain, Drafting(), "e4b", rows=8, positions=100)
    with pytest.raises(memory.DeviceMemoryError, match="the weights need 0"):
        jaxspec.load(drafter="none", dtype="float32")
    monkeypatch.setattr("jaxspec.weights.memory.bytes_limit", lambda mesh: 18 << 20)
    alone = jaxspec.load(drafter="none", dtype="float32")
    with pytest.raises(memory.DeviceMemoryError, match=r"8 rows .*: \d rows of this length fit"):
        jaxspec.generate(alone, [[2, 5]], max_new_tokens=500, batch_size=8)


def test_prompts_longer_than_a_chunk_are_fed_in_pieces() -> None:
    prompts = np.arange(2 * 1100, dtype=np.int32).reshape(2, 1100)
    chunks = measuring.chunks_of(prompts, 512)
    assert [c.tokens.shape[1] for c in chunks] == [512, 512, 76]
    assert [c.start.tolist() for c in chunks] == [[0, 0], [512, 512], [1024, 1024]]
    assert [c.is_last.tolist() for c in chunks] == [[False] * 2, [False] * 2, [True] * 2]
    np.testing.assert_array_equal(np.concatenate([c.tokens for c in chunks], axis=1), prompts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--random-weights", "e2b", "--target", "x"], "give no --target"),
        (
            ["--random-weights", "e2b", "--drafter", "x"],
            "only ngram, mtp, dspark, dflash2, dflash or none",
        ),
        (["--random-weights", "e2b", "--revision", "main"], "no options of the hub"),
        (["--tree-topk", "3", "--num-draft-tokens", "11"], "--tree-depth"),
        (
            ["--tree-topk", "3", "--tree-depth", "5", "--num-draft-tokens", "99"],
            "nodes, fewer than",
        ),
        ([*A_TREE, "--synthetic-acceptance", "2"], "--synthetic-acceptance is for chains"),
        (["--drafter", "none", "--num-draft-tokens", "3"], "needs a drafter"),
        (["--target", "no/such/place/here"], "no/such/place/here"),
        (["--context-length", "99"], "which no drafter can follow"),
        (["--random-weights", "e4b", "--new-tokens", "200000"], "need 200257 positions; e4b"),
        (["--plot", "steps.txt"], "expected a file that ends in"),
        (["--steps-only", "--plot", "steps.svg"], "--steps-only times whole steps alone"),
        (
            ["--prompt-length", "65"],
            "--prompt-length 65: the prompts of the bundled target have 64",
        ),
        (
            ["--drafter", "none", "--context-length", "9", "--prompt-length", "9"],
            "exclude each other",
        ),
        (["--top-k", "5"], "--top-k changes nothing at temperature 0"),
        (["--draft-sampling"], "--draft-sampling changes nothing at temperature 0"),
        (
            ["--temperature", "1", "--synthetic-acceptance", "2"],
            "--temperature: with --synthetic-acceptance",
        ),
    ],
)
def test_options_that_cannot_be_meant(options: list[str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    app = typer.Typer()
    app.command()(bench_command)
    result = CliRunner().invoke(app, [*options, "--json", str(path)])
    assert result.exit_code == 2
    assert message in result.output
    assert not path.exists()


def a_long_result(mode: str, label: str, scale: float) -> results.CaseResult:
    """Return a case whose every number is as wide as numbers get."""
    spread = results.Spread(1234.5 * scale, 1111.1 * scale, 1345.6 * scale)
    drafted = mode == "speculative"
    return results.CaseResult(
        mode=mode,
        label=label,
        batch_size=128,
        context_length=131072,
        step_tokens=16,
        cache_length=131712,
        cost=StepCost(61e9, 8e12, 9e15),
        floor_ms=spread.median / 1.5,
        draft_floor_ms=4.5,
        steps=256,
        step_ms=spread,
        tokens_per_s=spread,
        acceptance="synthetic" if drafted else None,
        acceptance_length=12.34 if drafted else None,
        draft_ms=spread if drafted else None,
        verify_ms=spread,
        rest_ms=-123.4,
        tpot_ms=spread,
        kernels_per_step=12345,
        host_round_trips_per_step=12,
        collectives_per_step=185,
        collective_bytes_per_step=123_456_789,
        ttft_ms=spread,
        achieved_bytes_per_s=3.85e12,
        prefill_compile_s=123.4,
        decode_compile_s=234.5,
        footprint=memory.Footprint(61 * 10**9, 70 * 10**9, 10**9),
        temporary_bytes=1 << 30,
        peak_bytes=139 << 30,
        distinct_experts=results.Spread(122.5, 101.0, 128.0),
    )


def test_tables_are_whole_at_80_columns_whatever_is_in_them() -> None:
    """Labels and numbers of the largest shapes make more tables, never cut ones; every column has its place."""
    measured = [
        a_long_result("plain", "plain", 10),
        a_long_result("speculative", "mtp tree 127", 10),
    ]
    text = io.StringIO()
    Console(file=text, width=80).print(*results.result_tables(measured, 5), sep="\n")
    assert max(map(len, text.getvalue().splitlines())) <= 80
    assert "…" not in text.getvalue()
    words = text.getvalue().split()
    assert "131,072" in words
    assert "12,345" in words
    for field in dataclasses.fields(results.CaseResult):
        for column in field.metadata["columns"]:
            assert text.getvalue().count(f" {column.heading} ") >= 1, column.heading


def test_floors_are_whole_at_80_columns() -> None:
    weights = {"some": jnp.zeros(1)}  # they say which devices
    big = ModelPair(mtp("31b", 127, Tree(4, 40)), weights, None, "31b", "MTP")
    cases = [results.Case(256, 131072, pair) for pair in (big.plain(), big)]
    text = io.StringIO()
    Console(file=text, width=80).print(results.floor_table(cases, 256, H200))
    assert max(map(len, text.getvalue().splitlines())) <= 80
    assert "…" not in text.getvalue()
    assert " mtp tree 127 " in text.getvalue()


def test_numbers_have_three_digits_and_no_exponent() -> None:
    values = (0, 0.00001234, 0.0123, 1.0, 12.34, 999.4, 999.96, 1234.5, 1e6)
    expected = ["0", "0.000012", "0.0123", "1", "12.3", "999", "1,000", "1,234", "1,000,000"]
    assert [results.digits(value) for value in values] == expected
