"""What runs on eight devices of the host, in a process of its own: JAX counts devices only once.

`python -m tests.tools.eight_devices CASE...` prints a line of JSON a case; `test_sharding` says what it has to be,
and sets the number of devices.

    split:NAME:DRAFTER:DATA:MODEL   decode a feature set on a mesh, and on one device
    kernels:NAME:DRAFTER:DATA:MODEL decode by interpreted kernels on a mesh of fewer devices
    pages:NAME:DRAFTER:DATA:MODEL:KIND  decode with caches in pages on a mesh, and with whole rows on one device
    mixed_passes:NAME:DRAFTER:MODEL decode in passes over prompts on a mesh, and apart on one device
    images:DATA:MODEL:DRAFTER       decode prompts with images on a mesh, and on one device
    grammars:DATA:MODEL:DRAFTER     decode rows of which most have grammars on a mesh, and on one device
    load                            place weights: random, of an Orbax directory, of Hugging Face's
    check                           `check` with and without --mesh
    cli                             the command with and without --mesh, and its errors
    errors                          weights that are not on one mesh
    sampler                         the in-process sampler on a mesh, and on one device
    whole                           samplers and engines of weights that are split, then whole on each device
    inside                          the sampler inside jitted functions, on meshes and under shard_map
    turns                           rows that take turns, on a mesh and inside jitted functions
    training_meshes                 weights on meshes as training programs make them
    moved                           weights from a training mesh to one for decoding
    products:FORMAT                 multiply by quantised weights that are split in all ways
    control                         a product that has to gather its weight
    two:PORT:PROCESS:DATA:MODEL     decode on two processes with four devices each
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxspec
from jaxspec import cache, constraint
from jaxspec.api import BUNDLED
from jaxspec.engine.engine import Engine, Request
from jaxspec.engine.length_forecast import LengthForecast
from jaxspec.engine.prefix_cache import store
from jaxspec.engine.prefix_cache.copies import RowSizes
from jaxspec.engine.request import Completion
from jaxspec.models import attention, moe, residual
from jaxspec.models.layers import project, project_gated, table_logits
from jaxspec.options import Drafting, ProgramFeatures, Sampling
from jaxspec.quantised.array import named_arrays, quantise
from jaxspec.rollout.batch import GenerateResult, Prompts
from jaxspec.rollout.sampler import Sampler
from jaxspec.runtime import memory, prefill
from jaxspec.shapes import Array, Params
from jaxspec.text.grammars import guides
from jaxspec.weights.define import formats_for
from jaxspec.weights.draft_head import with_draft_head
from jaxspec.weights.loading import LoadedModel, load_drafter, load_target
from jaxspec.weights.sharding import make_mesh, place, state_shardings
from jaxspec.weights.trees import place_params
from pallas_kernels.dispatch import devices_of_mesh
from tests import tiny_images, tiny_pair, tiny_photo
from tests.cases import CACHE_LENGTH, PROMPT_LENGTHS, Case, case, engine_of, sharing_passes, target
from tests.cases import run as run_all
from tests.engine.conftest import at_once
from tests.tiny import VOCAB_SIZE

ROWS, DRAFTS, NEW_TOKENS = 8, 4, 12


def on_mesh(model: LoadedModel, mesh: Mesh) -> LoadedModel:
    shardings = model.model_def.shardings(mesh)
    params = {name: place(x, shardings[name]) for name, x in model.params.items()}
    return dataclasses.replace(model, params=params)


def engine_on(mesh: Mesh, c: Case, drafter: str, **options: Any) -> Engine:
    made = None if drafter == "plain" else on_mesh(c.drafter(drafter), mesh)
    drafts = None if made is None else DRAFTS
    target = on_mesh(c.target, mesh)
    sizes: dict[str, Any] = dict(batch_size=ROWS, cache_length=64, num_draft_tokens=drafts)
    return engine_of(target, made, **(sizes | options))


def requests(c: Case, sampled: bool = False) -> list[Request]:
    values: dict[str, Any] = dict(temperature=1.2, top_k=40, top_p=0.95) if sampled else {}
    return [Request(prompt, NEW_TOKENS, Sampling(**values)) for prompt in c.prompts]


def decoded(engine: Engine, asked: list[Request]) -> list[Any]:
    return [[list(x.token_ids), list(x.acceptance_lengths)] for x in run_all(engine, asked)]


def split_sizes(engine: Engine) -> dict[int, str]:
    """Return how many numbers the weights have that are split, with a name for each."""
    weights = {**engine.target_params, **(engine.drafter_params or {})}
    return {x.size: name for name, x in weights.items() if not x.sharding.is_fully_replicated}


def weight_gathers(hlo: str, sizes: dict[int, str]) -> list[str]:
    """List instructions that bring together as many numbers as a split weight has, in whatever shape."""
    found = []
    for dims in re.findall(
        r"= \(?b?f\d+\[([\d,]+)\]\S* (?:all-gather|all-to-all)(?:-start)?\(", hlo
    ):
        size = int(np.prod([int(d) for d in dims.split(",")]))
        if size in sizes:
            found.append(f"[{dims}] like {sizes[size]}")
    return found


def caches_arrays(engine: Engine) -> list[Array]:
    """Return all arrays of caches."""
    state = engine._scheduler.slots.state
    return [x for c in cache.caches_of((state.caches, state.drafter)) for x in (c.k, c.v)]


def bytes_on(device: Any, arrays: list[Array]) -> int:
    """Return the bytes of arrays on one device."""
    shards = (shard for x in arrays for shard in x.addressable_shards)
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


def page_gathers(hlo: str, pages: set[tuple[int, ...]]) -> list[str]:
    """List collective instructions on pages.

    Args:
      pages: sizes of pages, [page, H].
    """
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    found = re.findall(rf"= \(?b?f\d+\[([\d,]+)\]\S* (?:{kinds})(?:-start)?\(", hlo)
    of_pages = (dims.split(",") for dims in found)
    return [
        ",".join(dims)
        for dims in of_pages
        if len(dims) >= 4 and tuple(map(int, dims[-2:])) in pages
    ]


def collectives(hlo: str) -> dict[str, int]:
    kinds = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    return {kind: len(re.findall(rf" {kind}(?:-start)?\(", hlo)) for kind in kinds}


def misplaced(engine: Engine) -> list[str]:
    """List arrays of the state that some program returns in another place than is declared."""
    whole = jax.eval_shape(lambda: engine.runtime.init_state(4))
    wrong = []
    for key, program in engine.runtime.used.items():
        state = whole.small if key[0] in ("admit", "retire") else whole
        declared = jax.tree_util.tree_leaves_with_path(state_shardings(state, engine.mesh))
        shapes = jax.tree.leaves(state)
        found = jax.tree.leaves(program.output_shardings)[: len(declared)]  # news come behind
        for (path, sharding), x, out in zip(declared, shapes, found, strict=True):
            if not out.is_equivalent_to(sharding, x.ndim):
                wrong.append(f"{key[0]}: {jax.tree_util.keystr(path)} by {out}")
    return wrong


def split(name: str, drafter: str, data: str, model: str) -> dict[str, Any]:
    """Decode on one device and on a mesh, greedily and not."""
    c = a_case(name, drafter)
    engine = engine_on(make_mesh(data=int(data), model=int(model)), c, drafter)
    result, sampled = decoded(engine, requests(c)), decoded(engine, requests(c, sampled=True))
    programs = {key[0]: program.as_text() for key, program in engine.runtime.used.items()}
    return {
        "equal": result == decoded(alone(name, drafter), requests(c)),
        "equal_sampled": sampled == decoded(alone(name, drafter), requests(c, sampled=True)),
        "most_accepted": max(max(lengths) for _, lengths in result),
        "misplaced": misplaced(engine),
        "gathers": [
            g for hlo in programs.values() for g in weight_gathers(hlo, split_sizes(engine))
        ],
        "collectives": collectives(programs["decode"]),
    }


def kernels(name: str, drafter: str, data: str, model: str) -> dict[str, Any]:
    """Decode on a mesh with kernels where there are some, and on one device with references."""
    c = a_case(name, drafter)
    expected = decoded(alone(name, drafter), requests(c))
    calls: dict[str, int] = {}

    def interpreted(operation: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            assert not devices_of_mesh()
            calls[operation.__name__] = calls.get(operation.__name__, 0) + 1
            return operation(*args, **options, implementation="triton", interpret=True)

        return call

    devices = jax.devices()[: int(data) * int(model)]
    mesh = make_mesh(data=int(data), model=int(model), devices=devices)
    with contextlib.ExitStack() as patches:
        for module, operation in (
            (attention, attention.attention),
            (attention, attention.qkv),
            (residual, residual.add_norm),
            (moe, moe.experts),
        ):
            to = interpreted(operation)
            patches.enter_context(mock.patch.object(module, operation.__name__, to))
        result = decoded(engine_on(mesh, c, drafter), requests(c))
    return {"equal": result == expected, "interpreted": sorted(calls)}


def pages(name: str, drafter: str, data: str, model: str, kind: str) -> dict[str, Any]:
    """Decode rows that outgrow their pages ("few"), that are read ahead, or that share stored prefixes.

    Of kind "host", prefixes are in host memory, and the engine was warmed up before. Count also how often rows
    gave up their pages, which parts had rows, tokens that came from the store, and compiled instructions that
    bring pages together.
    """
    c, tokens = a_case(name, drafter), 40 if kind == "few" else 24
    parts, devices = int(data), jax.devices()[: int(data) * int(model)]
    beginning = tuple(range(20, 36))  # of two prompts of three, where prefixes are stored
    prompts = [
        p if i % 3 or kind not in ("stored", "host") else beginning + p
        for i, p in enumerate(c.prompts)
    ]
    asked = [Request(p, tokens, id=i, sample=i) for i, p in enumerate(2 * prompts)]
    whole = alone(name, drafter)
    expected = [[i, *of] for i, of in enumerate(decoded(whole, asked))]
    with (
        mock.patch.object(cache, "PAGE", 8),
        mock.patch.object(store, "MIN_TOKENS", 8),
        mock.patch.object(LengthForecast, "__call__", at_once),
    ):
        mesh = make_mesh(data=parts, model=int(model), devices=devices)
        few = parts * whole.cache_length
        options: dict[str, Any] = dict(
            few=dict(cache_tokens=few),
            ahead=dict(cache_tokens=2 * few, read_ahead=3),
            stored=dict(read_ahead=parts, prefix_bytes=1 << 20),
            host=dict(read_ahead=parts, prefix_host_bytes=1 << 22),
        )[kind]
        if kind == "host":
            sizes = engine_on(mesh, c, drafter)
            options["prefix_bytes"] = RowSizes(sizes.spec, sizes.cache_length, mesh).min_bytes
        engine = engine_on(mesh, c, drafter, steps_per_return=1, **options)
        if kind == "host":
            engine.warm_up()
        count = engine.num_compilations
        slots, used, found = engine._scheduler.slots, set[int](), list[Any]()
        for request in asked:
            engine.add(request)
        while not engine.is_idle:
            for event in engine.step():
                if isinstance(event, Completion):
                    found.append([event.id, list(event.token_ids), list(event.acceptance_lengths)])
            used |= {slots.part(slot).number for slot in engine._scheduler.running}
            assert slots.pages is not None
            slots.pages.check([of.holders for of in engine._prefixes])
        engine._scheduler._release()
        stats, left = engine.prefix_stats, None
        if kind == "host":
            engine.warm_up()  # writes to all pages
            left = engine.prefix_stats
        sizes = {x.shape[2:] for x in caches_arrays(engine)}
        runtime = engine.runtime
        held = jax.tree.leaves((slots.state.caches, slots.state.drafter))
        of_caches = (engine.spec, runtime.num_rows, engine.cache_length, mesh, runtime.paging)
        programs = [p.as_text() for key, p in engine.runtime.used.items()]
        return {
            "equal": sorted(found) == expected,
            "lost": slots.pages.usage > 0,
            "preempted": engine.num_preemptions,
            "parts": sorted(used),
            "hit_tokens": stats.hit_tokens if stats else 0,
            "host_hits": stats.host_hits if stats else 0,
            "entries": [of.entries for of in (stats, left) if of],
            "compiled": engine.num_compilations - count,
            "ahead": engine.read_ahead,
            "gathers": [g for hlo in programs for g in page_gathers(hlo, sizes)],
            "bytes": bytes_on(devices[-1], held) - memory.caches_bytes(*of_caches),
        }


def mixed_passes(name: str, drafter: str, model: str) -> dict[str, Any]:
    """Decode in passes over prompts on a mesh, and apart on one device."""
    c = a_case(name, drafter)
    expected = decoded(alone(name, drafter), requests(c))
    mesh = make_mesh(data=1, model=int(model), devices=jax.devices()[: int(model)])
    with sharing_passes(64):
        few: dict[str, Any] = dict(batch_size=4, read_ahead=2, steps_per_return=2)
        engine = engine_on(mesh, c, drafter, **few)
        result = decoded(engine, requests(c))
    programs = {key[0]: program.as_text() for key, program in engine.runtime.used.items()}
    return {
        "equal": result == expected,
        "mixed": "mixed" in programs,
        "misplaced": misplaced(engine),
        "gathers": [
            g for hlo in programs.values() for g in weight_gathers(hlo, split_sizes(engine))
        ],
    }


def images(data: str, model: str, drafter: str) -> dict[str, Any]:
    """Decode prompts with images on one device and on a mesh, plain or with a drafter's drafts."""
    parts = ((5, (2, 3), 4), (3, (2, 2), 1, (4, 7), 12), (9,))
    prompts = [tiny_images.prompt(tiny_photo.VISION, *p, seed=i) for i, p in enumerate(parts)]
    asked = [Request(tuple(p.ids.tolist()), 12, images=p.images) for p in prompts]
    found = []
    with tempfile.TemporaryDirectory() as name:
        target = tiny_photo.write_target(Path(name) / "target")
        models = [str(target)]
        if drafter != "plain":
            models.append(str(tiny_photo.write_drafter(Path(name) / "drafter")))
        for mesh in (make_mesh(data=int(data), model=int(model)), None):
            pair = jaxspec.load(*models, mesh=mesh)
            engine = Engine(*pair, batch_size=4, cache_length=96)
            found.append(decoded(engine, asked))
    text = [dataclasses.replace(r, images=()) for r in asked]
    return {"equal": found[0] == found[1], "seen": found[1] != decoded(engine, text)}


def grammars(data: str, model: str, drafter: str) -> dict[str, Any]:
    """Decode rows with and without grammars. Count how often devices ask for them, and how often they are followed."""
    from tests.engine import test_grammars as on_one

    c, devices = on_one.case(), jax.devices()[: int(data) * int(model)]
    mesh = make_mesh(data=int(data), model=int(model), devices=devices)
    target, made = on_mesh(c.target, mesh), on_mesh(c.drafter(drafter), mesh)
    rows: dict[str, list[int]] = {"asked": [], "followed": []}

    def counting(name: str, function: Any) -> Any:
        def counted(numbers: np.ndarray, *args: Any, **options: Any) -> Any:
            rows[name].append(len(numbers))
            return function(numbers, *args, **options)

        return counted

    asking = mock.patch.object(constraint, "answer_once", counting("asked", constraint.answer_once))
    following = mock.patch.object(guides, "answer", counting("followed", guides.answer))
    with asking, following:
        engine = engine_of(
            target, made, batch_size=ROWS, cache_length=CACHE_LENGTH, **on_one.EXTRAS
        )
        found = run_all(engine, on_one.mixed())
    return {
        "equal": [x.token_ids for x in found] == [on_one.expected(row) for row in range(ROWS)],
        "errors": [x.error for x in found if x.error],
        "rows": sorted({*rows["asked"], *rows["followed"]}),
        "asked": len(rows["asked"]) / len(rows["followed"]),
    }


def a_case(name: str, drafter: str) -> Case:
    c = case(name) if drafter == "mixed" else Case(target(name), prompts_of(name), [])
    return dataclasses.replace(c, prompts=[prompt[:16] for prompt in c.prompts])


def prompts_of(name: str) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(1)
    return [tuple(rng.integers(20, VOCAB_SIZE, n).tolist()) for n in PROMPT_LENGTHS]


@functools.cache
def alone(name: str, drafter: str) -> Engine:
    """Return an engine on one device."""
    mesh = make_mesh(devices=jax.devices()[:1])
    return engine_on(mesh, a_case(name, drafter), drafter)


def load() -> dict[str, Any]:
    """Place weights in three ways; tell which differ from those on one device, or stand elsewhere."""
    mesh = make_mesh(data=2, model=4)
    model_def = target("26b-a4b").model_def
    pairs = {
        "random": (
            model_def,
            model_def.random_params(3, model_def.shardings(mesh)),
            model_def.random_params(3),
        )
    }
    with mock.patch("jaxspec.quantised.array.SLICE_NUMBERS", 5000):  # several slices a weight
        for format in ("int8", "int4"):
            packed = model_def.with_formats(formats_for(model_def, format))
            split = packed.random_params(3, packed.weight_shardings(mesh))
            pairs[format] = packed, split, packed.random_params(3)
    with tempfile.TemporaryDirectory() as directory:
        ours = str(tiny_pair.write_target(Path(directory) / "target"))
        for name, source, read in (
            ("ours", ours, load_target),
            ("theirs", str(BUNDLED / "target"), load_target),
            ("dflash", str(BUNDLED / "dflash"), load_drafter),
            ("mtp", str(BUNDLED / "mtp"), load_drafter),
        ):
            split, whole = read(source, dtype="float32", mesh=mesh), read(source, dtype="float32")
            pairs[name] = split.model_def, split.params, whole.params
            if name == "theirs":
                targets = split, whole
            if name == "dflash":
                theirs = str(BUNDLED / "target")
                with_int8 = [
                    load_target(theirs, dtype="float32", quantize_head="int8", mesh=where)
                    for where in (mesh, None)
                ]
                for kind, of in (("draft head", targets), ("of an int8 head", with_int8)):
                    with mock.patch("jaxspec.quantised.array.SLICE_NUMBERS", 5000):
                        parted, one = (
                            with_draft_head(drafter, target, "int4-g64")
                            for drafter, target in zip((split, whole), of, strict=True)
                        )
                    pairs[kind] = parted.model_def, parted.params, one.params
                    assert not parted.params["head"].codes.sharding.is_fully_replicated
    wrong = []
    for kind, (model_def, *trees) in pairs.items():
        params, expected = map(named_arrays, trees)
        shardings = named_arrays(model_def.shardings(mesh))
        assert any(not s.is_fully_replicated for s in shardings.values())
        for name, x in params.items():
            shards = {shard.data.shape for shard in x.addressable_shards}
            if x.sharding != shardings[name] or shards != {shardings[name].shard_shape(x.shape)}:
                wrong.append(f"{kind}: {name} by {x.sharding}")
            if len(expected[name].sharding.device_set) != 1:
                wrong.append(f"{kind}: {name} is not on one device without a mesh")
            if not np.array_equal(x, expected[name]):
                wrong.append(f"{kind}: {name} has other numbers")
    return {"wrong": wrong}


def cli() -> dict[str, Any]:
    """Run the command in this process."""
    from typer.testing import CliRunner

    from jaxspec.commands.cli import app

    with tempfile.TemporaryDirectory() as directory:
        models = [
            *("--target", str(tiny_pair.write_target(Path(directory) / "target"))),
            *("--drafter", str(tiny_pair.write_drafter(Path(directory) / "drafter"))),
        ]

        def run(*options: str) -> tuple[int, list[Any], str]:
            command = [
                "generate",
                *models,
                "--prompt-ids",
                "2,7,9",
                "--prompt-ids",
                "2,8",
                "--json",
                "-",
            ]
            result = CliRunner().invoke(app, [*command, "--max-new-tokens", "9", *options])
            lines = [json.loads(line) for line in result.stdout.splitlines()]
            return result.exit_code, lines, result.stderr

        code, lines, _ = run("--mesh", "data=2,model=4")
        _, alone, _ = run()
        tokens = [[line["token_ids"] for line in of[:-1]] for of in (lines, alone)]
        return {
            "code": code,
            "equal": tokens[0] == tokens[1] and len(tokens[0]) == 2,
            "meshes": [of[-1]["summary"]["mesh"] for of in (lines, alone)],
            "errors": {mesh: run("--mesh", mesh)[::2] for mesh in ("rows=8", "data=3,model=2")},
        }


def check() -> dict[str, Any]:
    """Check the bundled pair on a mesh and on one device, with two other readings."""
    from typer.testing import CliRunner

    from jaxspec.commands.check import search
    from jaxspec.commands.cli import app

    alternatives = search.alternatives

    def two_of_them(*given: Any) -> Any:
        readings, left_out = alternatives(*given)
        names = ("mask id 1", "feature layers reversed")
        return [r for r in readings if r.name in names], left_out

    search.alternatives = two_of_them
    reports = []
    for mesh in (["--mesh", "data=2,model=4"], []):
        small = ["--rows", "4", "--new-tokens", "16", "--batch-size", "4", "--dtype", "float32"]
        result = CliRunner().invoke(app, ["check", *small, *mesh, "--json", "-"])
        reports.append(json.loads(result.stdout))
    shares = [[x["mean"] for x in report["by_position"]] for report in reports]
    tried = [[c["name"] for c in report["rounds"][0]["comparisons"]] for report in reports]
    return {
        "codes": [report["sound"] for report in reports],
        "apart": max(abs(a - b) for a, b in zip(*shares, strict=True)),
        "first": shares[1][0],
        "tried": tried,
    }


def errors() -> dict[str, Any]:
    """Give engines weights that are not on one mesh."""
    model = target("31b")
    two, four = make_mesh(data=2, model=4), make_mesh(data=4, model=2)
    on_two = on_mesh(model, two)
    mixed = dataclasses.replace(
        on_two, params=on_two.params | {"final_norm": model.params["final_norm"]}
    )
    other = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    everywhere = NamedSharding(other, PartitionSpec())
    foreign = {name: jax.device_put(x, everywhere) for name, x in model.params.items()}
    dflash = Case(model, [], []).drafter("dflash")
    cases = {
        "mixed": lambda: Engine(mixed, None),
        "drafter": lambda: Engine(on_two, on_mesh(dflash, four)),
        "foreign": lambda: Engine(dataclasses.replace(model, params=foreign), None),
        "pages": lambda: Engine(on_two, None, cache_length=640, cache_tokens=1279),
    }
    found = {}
    for name, make in cases.items():
        try:
            make()
        except ValueError as error:
            found[name] = str(error)
    return {
        **found,
        "rows": [Engine(on_two, None, batch_size=n).batch_size for n in (1, 2, 3, 8, 45)],
        "ahead": Engine(on_two, None, batch_size=4, read_ahead=3).read_ahead,
    }


def sampler_of(target: LoadedModel, assistant: LoadedModel) -> Sampler:
    """Return the sampler of two cases, which share its programs: they take longest to compile."""
    return Sampler(
        target,
        assistant,
        max_new_tokens=NEW_TOKENS,
        num_samples=2,
        drafting=Drafting(2),
        program_features=ProgramFeatures(logprobs=True),
    )


def sampled_on(params: Any, c: Case, assistant: LoadedModel) -> GenerateResult:
    ask = sampler_of(c.target, assistant)
    return ask(*params, c.prompts[:4], ask.sampling(8, temperature=[0.0, 1.0] * 4), np.arange(8))


def sampler() -> dict[str, Any]:
    """Call samplers with weights split over a mesh, and on one device."""
    c = a_case("31b", "mtp")
    models = c.target, c.drafter("mtp")
    meshes = make_mesh(data=2, model=4), make_mesh(devices=jax.devices()[:1])
    spread, alone = (
        sampled_on([on_mesh(x, mesh).params for x in models], c, models[1]) for mesh in meshes
    )
    assert spread.logprobs is not None
    assert alone.logprobs is not None
    return {
        "equal": spread.tokens.tolist() == alone.tokens.tolist(),
        "near": bool(np.allclose(spread.logprobs.target, alone.logprobs.target, atol=1e-4)),
        "devices": len(spread.tokens.sharding.device_set),
    }


def whole() -> dict[str, Any]:
    """Call a sampler and an engine with weights split over a mesh, then with those whole on each of its devices."""
    c, mesh = a_case("31b", "mtp"), make_mesh(data=2, model=4)
    assistant = c.drafter("mtp")
    split = [on_mesh(x, mesh).params for x in (c.target, assistant)]
    everywhere = jax.device_put(split, NamedSharding(mesh, PartitionSpec()))
    first, second = (sampled_on(params, c, assistant) for params in (split, everywhere))
    engine, asked = engine_on(mesh, c, "mtp"), requests(c)[:4]
    expected = decoded(engine, asked)
    engine.target_params, engine.drafter_params = everywhere
    return {
        "sampler": first.tokens.tolist() == second.tokens.tolist(),
        "engine": decoded(engine, asked) == expected,
    }


def inside() -> dict[str, Any]:
    """Call a sampler inside jitted functions: on an explicit mesh with an axis of its own, and mapped."""
    c = a_case("31b", "dflash")
    ask = Sampler(c.target, max_new_tokens=NEW_TOKENS)
    prompts, sampling = Prompts.padded(c.prompts), Sampling(temperature=1.0)

    def run(params: Params, prompts: Prompts, seeds: Array) -> GenerateResult:
        return ask(params, None, prompts, sampling, seeds)

    seeds = np.arange(len(c.prompts))
    expected = run(c.target.params, prompts, seeds).tokens.tolist()
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "model"))
    with jax.set_mesh(mesh):
        weights = as_trained(c.target, mesh, fully_sharded=True).params
        explicit = jax.jit(run)(weights, prompts, seeds)
    rows, whole = PartitionSpec("data"), PartitionSpec()
    mapped = jax.shard_map(
        run, mesh=make_mesh(data=8), in_specs=(whole, rows, rows), out_specs=rows
    )
    parts = jax.jit(mapped)(c.target.params, prompts, seeds).tokens
    return {
        "explicit": explicit.tokens.tolist() == expected,
        "mapped": parts.tolist() == expected,
        "spread": len({str(shard.index) for shard in parts.addressable_shards}),
    }


def turns() -> dict[str, Any]:
    """Let rows take turns on a mesh, on one of explicit axes, and on each device for itself."""
    c = a_case("31b", "mtp")
    assistant, samples = c.drafter("mtp"), 4
    options: Any = dict(max_new_tokens=NEW_TOKENS, num_samples=samples, drafting=Drafting(2))
    whole, few, fewer = (
        Sampler(c.target, assistant, batch_size=n, **options) for n in (None, 16, 2)
    )
    prompts = Prompts.padded(c.prompts)
    rows = len(c.prompts) * samples
    seeds, limits = np.arange(rows), np.arange(rows) % NEW_TOKENS + 1

    def run(ask: Sampler, params: Any, prompts: Prompts, seeds: Any, limits: Any) -> GenerateResult:
        sampling = Sampling(temperature=1.0)
        return ask(*params, prompts, sampling, seeds, max_new_tokens=limits)

    given = (prompts, seeds, limits)
    params = [model.params for model in (c.target, assistant)]
    expected = run(whole, params, *given)
    mesh = make_mesh(data=2, model=4)
    spread = run(few, [on_mesh(model, mesh).params for model in (c.target, assistant)], *given)
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    with jax.set_mesh(mesh):
        weights = [as_trained(model, mesh, False).params for model in (c.target, assistant)]
        explicit = jax.jit(functools.partial(run, few))(weights, *given)
    split, everywhere = PartitionSpec("data"), PartitionSpec()
    mapped = jax.shard_map(
        functools.partial(run, fewer),
        mesh=make_mesh(data=8),
        in_specs=(everywhere, split, split, split),
        out_specs=split,
    )
    parts = jax.jit(mapped)(params, *given)

    def equal(result: GenerateResult) -> bool:
        pairs = zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True)
        return all(np.array_equal(a, b) for a, b in pairs)

    return {"mesh": equal(spread), "explicit": equal(explicit), "mapped": equal(parts)}


def training_meshes() -> dict[str, Any]:
    """Decode weights as training programs hold them: on explicit meshes, and with an axis of their own.

    All of them are decoded on one mesh, and share its programs.
    """
    c = a_case("31b", "mtp")
    models = c.target, c.drafter("mtp")
    asked = requests(c)
    expected = decoded(alone("31b", "mtp"), asked)
    found: dict[str, Any] = {}
    for name, sizes, axes in (
        ("explicit", (2, 4), ("data", "model")),
        ("an axis of 1", (2, 1, 4), ("data", "fsdp", "model")),
        ("fsdp", (1, 2, 4), ("data", "fsdp", "model")),
    ):
        mesh = jax.make_mesh(sizes, axes)
        with jax.set_mesh(mesh):
            held = [as_trained(model, mesh, name == "fsdp") for model in models]
            if name == "fsdp":
                try:
                    Engine(*held)
                except ValueError as error:
                    found["refused"] = str(error)
                held = [
                    dataclasses.replace(m, params=place_params(m.params, m.model_def, mesh))
                    for m in held
                ]
            engine = engine_of(*held, batch_size=ROWS, cache_length=64, num_draft_tokens=DRAFTS)
            result = decoded(engine, asked)
            # One prompt of the bucket is padding, which is cut off on the mesh of the weights.
            sampled = sampler_of(*held)(*(m.params for m in held), c.prompts[:3])
            found[name] = [
                result == expected,
                sampled.tokens.tolist() == [tokens for tokens, _ in expected[:3] for _ in range(2)],
            ]
    return found


def as_trained(model: LoadedModel, mesh: Mesh, fully_sharded: bool) -> LoadedModel:
    """Place weights on another mesh as decoding would, or split over `fsdp` too where their first axis divides."""
    placed = {}
    for name, sharding in model.model_def.shardings(make_mesh(data=2, model=4)).items():
        x, spec = model.params[name], sharding.spec
        if fully_sharded:
            divides = x.ndim > 0 and x.shape[0] % 2 == 0
            spec = PartitionSpec("fsdp") if divides else PartitionSpec()
        placed[name] = jax.device_put(np.asarray(x), NamedSharding(mesh, spec))
    return dataclasses.replace(model, params=placed)


def moved() -> dict[str, Any]:
    """Move a tree of weights that is split over fsdp and tensor to where decoding wants them, by one call."""
    model = target("31b")
    trained = jax.make_mesh((4, 2), ("fsdp", "tensor"))
    tree: dict[tuple[str, ...], Any] = {}
    for name, x in model.params.items():
        axes = [
            axis if i < x.ndim and x.shape[i] % trained.shape[axis] == 0 else None
            for i, axis in enumerate(trained.axis_names)
        ]
        split = NamedSharding(trained, PartitionSpec(*axes[: x.ndim]))
        tree[tuple(name.split("."))] = jax.device_put(np.asarray(x), split)
    mesh = make_mesh(data=2, model=4)
    placed = place_params(unflatten_dict(tree), model.model_def, mesh)
    where = model.model_def.shardings(mesh)
    return {
        "split before": sum(not x.sharding.is_fully_replicated for x in tree.values()) > 20,
        "misplaced": [name for name, x in placed.items() if x.sharding != where[name]],
        "equal": all(np.array_equal(placed[name], x) for name, x in model.params.items()),
    }


def control() -> dict[str, Any]:
    """Flatten a weight before its product, so that the split axis is inside another: XLA has to gather it."""
    mesh = make_mesh(data=2, model=4)
    weight = place(
        np.ones((48, 2, 64), np.float32), NamedSharding(mesh, PartitionSpec(None, None, "model"))
    )
    x = place(np.ones((3, 48), np.float32), NamedSharding(mesh, PartitionSpec()))
    found = {}
    for name, product in {
        "flat": lambda x, w: x @ w.reshape(48, 128),
        "ours": project,
    }.items():
        hlo = jax.jit(product).lower(x, weight).compile().as_text() or ""
        found[name] = weight_gathers(hlo, {weight.size: "weight"})
    return found


def products(format: str) -> dict[str, float]:
    """Return by how much products on a mesh differ from those on one device, in shares of the largest."""
    rng, found = np.random.default_rng(0), {}

    def normal(*shape: int) -> Array:
        return jax.numpy.asarray(rng.normal(size=shape), np.float32)

    def gated(x: Array, weight: Any) -> Array:
        return project_gated(x, weight, "gelu_tanh")

    heads, queries = attention.KV_WEIGHT_AXES, attention.OUT_WEIGHT_AXES
    packed = jax.jit(quantise, static_argnums=(1, 2))
    for name, shape, contracting, axes, product in (
        ("outputs", (128, 8, 3, 32), (0,), heads, project),
        ("heads", (8, 2, 64, 128), (0, 1, 2), queries, functools.partial(project, inputs=3)),
        ("groups", (2, 4, 64, 128), (0, 1, 2), queries, functools.partial(project, inputs=3)),
        ("inputs", (512, 128), (0,), ("mlp", None), project),
        ("blocks that end within a part", (96, 128), (0,), ("mlp", None), project),
        ("gate and up", (128, 2, 256), (0,), ("inputs", None, "mlp"), gated),
        ("gate and up by inputs", (256, 2, 46), (0,), ("inputs", None, "mlp"), gated),
        ("table", (512, 128), (1,), ("vocab", None), table_logits),
    ):
        weight = packed(normal(*shape), format, contracting)
        weight.axes = axes
        x = normal(4, 2, *(shape[i] for i in contracting))
        expected = jax.jit(product)(x, weight)
        with jax.set_mesh(make_mesh(data=2, model=4)):
            apart = abs(np.asarray(jax.jit(product)(x, weight)) - expected)
        found[name] = float(apart.max() / abs(expected).max())
    return found


def two(port: str, process: str, data: str, model: str) -> dict[str, Any]:
    """Decode on the devices of two processes; the other one runs this as well."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(process))
    c = a_case("26b-a4b", "mixed")
    asked = requests(c)
    engine = engine_on(make_mesh(data=int(data), model=int(model)), c, "mixed")
    result = decoded(engine, asked)
    mine = make_mesh(devices=jax.local_devices()[:1])
    return {
        "equal": result == decoded(engine_on(mine, c, "mixed"), asked),
        "processes": len({d.process_index for d in engine.mesh.devices.flat}),
        "misplaced": misplaced(engine),
    }


def main() -> None:
    """Run the cases, under the small chunks and tight rings of the fixture `tight`."""
    cache.RING_MULTIPLE = 1
    prefill.PREFILL_CHUNK = 16
    kinds = {
        f.__name__: f
        for f in (
            split,
            kernels,
            images,
            pages,
            mixed_passes,
            grammars,
            load,
            cli,
            check,
            errors,
            sampler,
            whole,
            inside,
            turns,
            training_meshes,
            moved,
            products,
            control,
            two,
        )
    }
    for text in sys.argv[1:]:
        kind, *values = text.split(":")
        print(json.dumps({"case": text, **kinds[kind](*values)}), flush=True)


if __name__ == "__main__":
    main()
