"""Decode loops compiled for an H200 without one: caches stay in place, weights are not copied.

Needs the CUDA wheels (`pip install 'jax[cuda13]'`), no GPU; where there is none, set
JAX_PLATFORMS=cpu, or the wheels look for a driver and do not start. Without them there is nothing
to compile with, and the tests are skipped.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import os
import pathlib
import re
import subprocess
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec import decode
from jaxspec import state as states
from jaxspec.cache import Paging, cache_bytes, caches_of, pages_for
from jaxspec.configs.dflash import PRESETS as DFLASH_PRESETS
from jaxspec.configs.gemma4 import PRESETS as TARGET_PRESETS
from jaxspec.configs.gemma4_vision import PRESETS as VISION_PRESETS
from jaxspec.configs.mtp import PRESETS as MTP_PRESETS
from jaxspec.decode_loop import decode_loop
from jaxspec.drafters.dflash import DFlashDrafter
from jaxspec.drafters.mtp import MTPDrafter
from jaxspec.engine.prefix_cache.copies import PAGES_A_COPY, copy_pages, lift_pages, lower_pages
from jaxspec.mixed_step import mixed_step
from jaxspec.models.gemma4 import Gemma4
from jaxspec.models.layers import project_gated
from jaxspec.models.target import ImageTokens
from jaxspec.models.xla import COMPILER_OPTIONS
from jaxspec.options import Drafting, Tree
from jaxspec.quantised.array import quantise, quantise_in_slices
from jaxspec.runtime.programs import options_of_loops
from jaxspec.runtime.runtime import embed_images
from jaxspec.state import DecodeSpec, PrefillChunk
from jaxspec.weights.define import formats_for, model_def_of, with_kv_dtype
from jaxspec.weights.draft_head import model_def_with_head
from jaxspec.weights.model_def import ModelDef
from jaxspec.weights.sharding import make_mesh, state_shardings
from pallas_kernels import int8_matmul
from pallas_kernels.attention import KVSegment, attention
from pallas_kernels.attention.tuning import tiling_at_once
from pallas_kernels.experts import MmaConfig, experts
from pallas_kernels.experts.coded import multiply_gate_up
from pallas_kernels.experts.routing import route
from pallas_kernels.experts.tuning import mosaic_tiling_for, tiling_for
from pallas_kernels.int4_matmul import Codes, Coding, TileConfig, linear
from pallas_kernels.int8_matmul.cases import SHAPES
from tests.pallas_kernels.inputs.experts import GEMMA4_26B_A4B, abstract_codes, abstract_inputs
from tests.tools.chips import H200, OTHERS, Chip, has_cuda_wheels

# Any copy of a weight of these shapes is larger (but the router's, 0.7 MB), any activation of one
# row smaller.
LIMIT_BYTES = 5 << 20

pytestmark = pytest.mark.skipif(not has_cuda_wheels(), reason="the CUDA wheels are not installed")


def small(preset: str, drafts: str) -> DecodeSpec:
    """Return a released shape with one sliding and one full layer, and as much of its drafter.

    Assistants ("mtp", "mtp tree") stay whole: they are small, and their four layers read these two.
    """
    drafts, _, verified = drafts.partition(", ")
    if verified == "chosen in each step":
        return dataclasses.replace(small(preset, drafts), widths=(1, 3, 15))
    if verified:
        return small(preset, drafts).verifying({"none verified": 0, "3 verified": 3}[verified])
    layers = ("sliding", "full")
    target = dataclasses.replace(TARGET_PRESETS[preset], layer_types=layers, num_kv_shared_layers=0)
    if drafts.startswith("mtp"):
        return DecodeSpec(
            ModelDef(Gemma4, target, "bfloat16"),
            ModelDef(MTPDrafter, MTP_PRESETS[preset], "bfloat16"),
            Drafting(11, Tree(3, 5)) if drafts == "mtp tree" else Drafting(7),
        )
    if drafts == "none":
        return DecodeSpec(ModelDef(Gemma4, target, "bfloat16"), None)
    drafter = dataclasses.replace(
        DFLASH_PRESETS[preset],
        layer_types=layers,
        causal=(True, False),
        feature_layers=(0, 0),
        num_target_layers=2,
    )
    return DecodeSpec(
        ModelDef(Gemma4, target, "bfloat16"),
        ModelDef(DFlashDrafter, drafter, "bfloat16"),
        Drafting(11, Tree(3, 5)) if drafts == "tree" else Drafting(15),
    )


def abstract_state(spec: DecodeSpec, batch: int, paging: Paging | None) -> Any:
    """Return the shapes of a state of rows of 2,048 positions."""
    return jax.eval_shape(
        lambda: states.init_state(
            spec,
            batch,
            cache_length=2048,
            num_stop_ids=4,
            cache_dtype=spec.target.cache_dtype,
            paging=paging,
        )
    )


def compile_loop_on_mesh(
    spec: DecodeSpec, batch: int, data: int, model: int, paging: Paging | None = None
) -> str:
    """Return the optimized loop of a mesh of H200s.

    Args:
      paging: with it, rows have several pages, and half of them are computed.
    """
    there = topologies.get_topology_desc(
        platform="cuda", target_config=H200.described, topology=f"1x1x{data * model}"
    )
    mesh = make_mesh(data=data, model=model, devices=there.devices)
    state = abstract_state(spec, batch, paging)
    places = state_shardings(state, mesh)
    state = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state, places
    )
    models = (m and m.placed_shapes(mesh) for m in (spec.target, spec.drafter))
    rounds = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    loop = jax.jit(
        functools.partial(decode_loop, spec),
        donate_argnums=2,
        out_shardings=places,
        compiler_options=options_of_loops(mesh),
    )
    more: tuple[Any, ...] = ()
    if paging is not None:

        def of_rows(*shape: int) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(mesh, PartitionSpec("data"))
            return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)

        sizes = {c.num_slots for c in caches_of((state.caches, state.drafter))}
        tables = {size: of_rows(batch, pages_for(size)) for size in sizes}
        more = rounds, of_rows(batch // 2), None, tables
    with jax.set_mesh(mesh):
        return loop.lower(*models, state, rounds, *more).compile().as_text() or ""


def compile_loop(
    spec: DecodeSpec,
    batch: int,
    rows: int | None = None,
    chip: Chip = H200,
    paging: Paging | None = None,
) -> tuple[Any, Any]:
    """Return the compiled loop and its abstract state.

    Args:
      rows: of a program for few of the slots.
      paging: with it, rows have several pages.
    """
    state = abstract_state(spec, batch, paging)
    args = (
        spec.target.abstract_params(),
        None if spec.drafter is None else spec.drafter.abstract_params(),
        state,
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    if rows is not None:
        args += (jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.int32))
    if paging is not None:
        sizes = {c.num_slots: pages_for(c.num_slots) for c in caches_of(state)}
        tables = {n: jax.ShapeDtypeStruct((batch, pages), jnp.int32) for n, pages in sizes.items()}
        args += (None, tables)
    if spec.widths:
        costs = jax.ShapeDtypeStruct((len(spec.widths),), jnp.float32)
        args += (jax.ShapeDtypeStruct((), jnp.int32), None, None, None, costs)
    loop = functools.partial(decode_loop, spec)
    options: dict[str, Any] = dict(donate_argnums=2, compiler_options=COMPILER_OPTIONS)
    return chip.compile(loop, *args, **options), state


NEEDS_MOSAIC = pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2), reason="the Mosaic kernels need jax 0.11.2"
)

WORSE_WITH_012 = functools.partial(pytest.mark.xfail, jax.__version_info__ >= (0, 12), strict=True)
"""What a newer XLA does worse. The program_features `cuda` and `cuda12` hold jax below it."""

MOVES = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "broadcast", "iota"}
MOVES |= {"convert", "copy", "transpose", "concatenate", "slice", "dynamic-slice", "reshape", "pad"}
ITEM_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "f8e4m3fn": 1,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
}
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = \(?(\w+)\[([\d,]*)\]\S* ([\w-]+)\(")


def big_moves(hlo: str, limit_bytes: int = LIMIT_BYTES) -> list[str]:
    """List instructions that write over `limit_bytes` and compute nothing, such as copies."""
    bodies: dict[str, list[str]] = {}
    for block in re.split(r"\n(?=\S)", hlo):
        header = re.match(r"(?:ENTRY )?%([\w.-]+) ", block)
        if header:
            bodies[header[1]] = block.splitlines()[1:]
    fused = set(re.findall(r" fusion\(.*calls=%([\w.-]+)", hlo))
    found = []
    for name, lines in bodies.items():
        if name in fused:
            continue
        for line in lines:
            match = _INSTRUCTION.match(line)
            if not match:
                continue
            result, item, dims, op = match.groups()
            size = ITEM_BYTES.get(item, 4) * math.prod(int(d) for d in dims.split(",") if d)
            if size <= limit_bytes:
                continue
            called = re.search(r"calls=%([\w.-]+)", line)
            if op == "fusion" and called:
                inner = [m[4] for m in map(_INSTRUCTION.match, bodies[called[1]]) if m]
                moves = all(i in MOVES for i in inner)
            else:
                moves = op in ("copy", "copy-start", "transpose", "concatenate", "dynamic-slice")
            if moves:
                found.append(f"{name}: {result} = {item}[{dims}] {op}")
    return found


def conditions_without_operations(hlo: str) -> list[str]:
    """List conditions of loops that are an element of the carry as it stands.

    A CUDA graph has no node for such a condition, so nothing orders the loop behind what it waits for.
    """
    found = []
    for name in set(re.findall(r"condition=%?([\w.-]+)", hlo)):
        body = re.search(rf"\n%?{re.escape(name)} .*?\n}}", hlo, re.DOTALL)
        assert body, name
        root = re.search(r"ROOT .*? = \S+ ([\w-]+)\(", body[0])
        assert root, name
        if root[1] in ("get-tuple-element", "parameter", "constant"):
            found.append(name)
    return found


@pytest.mark.parametrize(
    ("preset", "drafts", "data", "model"),
    [
        ("31b", "none", 1, 2),
        ("26b-a4b", "none", 1, 2),
        ("31b", "dflash", 1, 2),
        ("26b-a4b", "dflash", 1, 2),
        ("31b", "none", 1, 8),
        ("26b-a4b", "dflash", 1, 8),
        ("26b-a4b", "dflash", 2, 4),
    ],
)
def test_devices_exchange_activations_only(preset: str, drafts: str, data: int, model: int) -> None:
    """No weight and no row of logits is gathered, and each layer has two sums: with experts three.

    A full layer whose K/V heads are fewer than the devices has one more, of its queries.
    """
    spec, batch = small(preset, drafts), 8 * data
    found = compile_loop_on_mesh(spec, batch, data, model)
    batch //= data  # of a device
    most = 3 if spec.target.config.num_experts else 2
    exchanged = re.findall(r"= (.*?) (all-reduce|all-gather|all-to-all)(?:-start)?\(", found)
    largest = {"all-reduce": 0, "all-gather": 0, "all-to-all": 0}
    sums = 0
    for shape, kind in exchanged:
        dims = re.findall(r"\[([\d,]*)\]", shape)
        size = max(math.prod(int(n) for n in d.split(",") if n) for d in dims)
        largest[kind] = max(largest[kind], size)
        sums += kind == "all-reduce" and size >= batch * spec.target.config.hidden_size
    config = spec.target.config
    few_heads = config.full_num_kv_heads % model > 0
    heads = config.num_heads + 2 * config.full_num_kv_heads
    widest = heads * config.full_head_dim if few_heads else config.hidden_size
    assert 0 < largest["all-reduce"] <= batch * spec.step_tokens * widest
    assert largest["all-gather"] <= 1024
    assert not largest["all-to-all"]
    drafter = 0 if spec.drafter is None else len(spec.drafter.config.layer_types)
    embeddings = 1 if spec.drafter is None else 2
    features = 0 if spec.drafter is None else 1  # of a DFlash drafter: one product of them all
    of_target = most * len(config.layer_types) + few_heads
    assert sums <= of_target + 2 * drafter + embeddings + features


@NEEDS_MOSAIC
def test_rows_that_are_split_keep_their_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """No device sends another any row, kernels run on each, and no cache is copied."""
    monkeypatch.setattr("pallas_kernels.attention.capability", lambda: 9.0)
    spec = small("26b-a4b", "dflash")
    hlo = compile_loop_on_mesh(spec, 64, 2, 1, Paging(64, 32 * 2048, 2))
    assert big_moves(hlo) == []
    found = re.findall(r"= (.*) (all-\w+|collective-permute|reduce-scatter)(?:-start)?\(", hlo)
    # Whether any row is alive, or is sampled.
    assert {kind for _, kind in found} == {"all-reduce"}
    assert [shape for shape, _ in found if re.search(r"\[\d", shape)] == []
    assert "mosaic_gpu" in hlo


def test_devices_multiply_8_bit_floats_and_exchange_scales_of_rows() -> None:
    """31B in fp8-dynamic. Devices round a row by one scale, of its largest number on any of them."""
    spec, batch = small("31b", "none"), 8
    formats = formats_for(spec.target, "fp8-dynamic")
    found = compile_loop_on_mesh(
        dataclasses.replace(spec, target=spec.target.with_formats(formats)), batch, 1, 2
    )
    layers, width = len(spec.target.config.layers), spec.target.config.hidden_size
    shapes = re.findall(r"(\w+)\[([\d,]+)\]\S* all-reduce(?:-start)?\(", found)
    scales = [shape for shape in shapes if shape == ("f32", str(batch))]
    sums = [shape for shape in shapes if shape == ("bf16", f"{batch},{width}")]
    assert len(scales) == len(sums) == 2 * layers
    assert not re.search(r"f8e4m3fn\[[\d,]+\]\S* all-gather", found)
    products = re.findall(r'custom_call_target="mosaic_gpu|matmul.f8"| dot\(', found)
    assert len(products) >= 4 * layers


@pytest.mark.parametrize(
    ("preset", "batch", "drafts", "temporary_mb"),
    [
        ("26b-a4b", 1, "chain", 64),  # of which logits of 16 rows: 33 MB
        ("26b-a4b", 1, "tree", 64),
        ("26b-a4b", 8, "none", 32),
        # The products of one row with the smallest MLP weight would be 24 MB.
        ("26b-a4b", 1, "none", 8),
        ("31b", 1, "chain", 64),
        ("31b", 1, "tree", 64),
        ("26b-a4b", 1, "mtp", 32),  # of which logits of 8 rows, in three forms: 25 MB
        ("26b-a4b", 1, "mtp tree", 48),
        ("31b", 1, "mtp", 32),
        ("31b", 1, "mtp tree", 48),
        ("26b-a4b", 8, "chain, none verified", 64),
        ("31b", 1, "chain, 3 verified", 64),
        ("31b", 8, "mtp, none verified", 64),
        ("31b", 1, "chain, chosen in each step", 96),
    ],
)
def test_the_loop_copies_neither_weights_nor_caches(
    preset: str, batch: int, drafts: str, temporary_mb: int
) -> None:
    compiled, state = compile_loop(small(preset, drafts), batch)
    memory = compiled.memory_analysis()
    print(f"{preset}, batch {batch}: {memory}")
    assert memory.alias_size_in_bytes >= cache_bytes((state.caches, state.drafter))
    assert memory.temp_size_in_bytes < temporary_mb << 20
    hlo = compiled.as_text()
    assert "/qkv/pallas_call" in hlo  # it writes the caches, unless that is a tree's `keep_rows`
    assert "/add_norm/pallas_call" in hlo
    assert big_moves(hlo) == []
    assert conditions_without_operations(hlo) == []


@NEEDS_MOSAIC
@pytest.mark.parametrize(
    ("preset", "rows", "drafts", "temporary_mb", "paged"),
    [
        ("31b", 1, "chain", 64, False),  # of which logits of 16 rows: 33 MB
        ("26b-a4b", 8, "chain", 512, False),
        ("e4b", 1, "mtp", 64, False),
        ("31b", 8, "chain", 512, True),
        ("26b-a4b", 8, "mtp", 512, True),
    ],
)
def test_a_loop_over_a_few_of_many_slots_copies_no_cache(
    monkeypatch: pytest.MonkeyPatch,
    preset: str,
    rows: int,
    drafts: str,
    temporary_mb: int,
    paged: bool,
) -> None:
    """Drafts, verification and what the drafter absorbs read and write rows of the caches where they are."""
    monkeypatch.setattr("pallas_kernels.attention.capability", lambda: 9.0)
    paging = Paging(32, 16 * 2048) if paged else None
    compiled, state = compile_loop(small(preset, drafts), 32, rows, paging=paging)
    memory = compiled.memory_analysis()
    print(f"{preset} {drafts}, {rows} of 32 slots: {memory}")
    assert memory.alias_size_in_bytes >= cache_bytes((state.caches, state.drafter))
    assert memory.temp_size_in_bytes < temporary_mb << 20
    hlo = compiled.as_text()
    assert big_moves(hlo) == []
    if (
        not paged and preset == "31b"
    ):  # XLA reads one row of E4B's small rings; for 26B-A4B it was not settled
        assert moves_of_caches(hlo, [cache for cache in state.caches if cache is not None]) == []


@NEEDS_MOSAIC
@pytest.mark.parametrize(("preset", "experts"), [("31b", False), ("26b-a4b", True)])
def test_rows_that_compete_share_a_pass_of_kernels(
    monkeypatch: pytest.MonkeyPatch, preset: str, experts: bool
) -> None:
    """A pass of 3 drafts on average has 32 tokens of 8 rows: no cache and no weight is gathered for them."""
    monkeypatch.setattr("pallas_kernels.attention.capability", lambda: 9.0)
    spec, rows = small(preset, "chain, chosen in each step"), 8
    compiled, state = compile_loop(spec, rows)
    assert compiled.memory_analysis().temp_size_in_bytes < 512 << 20  # of which logits: 134 MB each
    hlo = compiled.as_text()
    assert big_moves(hlo) == []
    if preset == "31b":  # widths of 26B-A4B are as long as its caches here
        assert moves_of_caches(hlo, [cache for cache in state.caches if cache is not None]) == []
    assert conditions_without_operations(hlo) == []
    heads = re.findall(r"\[(\d+),262144\]\S* fusion\(.*/verify/head", hlo)
    assert {rows * (width + 1) for width in spec.widths} <= {*map(int, heads)}
    layers = len(spec.target.config.layer_types) * len(spec.widths)
    kernels = (
        "qkv",
        "attention",
        "add_norm",
        *(("experts_gate_up", "experts_down") if experts else ()),
    )
    for kernel in kernels:
        assert len(re.findall(rf"/verify/\S*{kernel}/pallas_call", hlo)) >= layers, kernel


def state_in_pages(preset: str, drafts: str) -> tuple[Any, list[Any]]:
    """Return an abstract state of 32 rows in pages, and its caches."""
    spec = small(preset, drafts)
    options: dict[str, Any] = dict(cache_length=2048, num_stop_ids=4)
    options |= dict(cache_dtype=spec.target.cache_dtype, paging=Paging(32, 16 * 2048))
    state = jax.eval_shape(lambda: states.init_state(spec, 32, **options))
    caches = caches_of((state.caches, state.drafter))
    return state, caches


@pytest.mark.parametrize(("preset", "drafts"), [("31b", "chain"), ("26b-a4b", "mtp")])
def test_pages_of_prefixes_are_copied_within_the_caches(preset: str, drafts: str) -> None:
    """The program that gives rows copies of pages writes into the caches, and writes nothing else of their size."""
    state, caches = state_in_pages(preset, drafts)
    pairs = {}
    for cache in caches:
        count = 1 if cache.ring_slack is None else pages_for(cache.num_slots)
        pairs[cache.num_slots] = (jax.ShapeDtypeStruct((1, count), jnp.int32),) * 2
    compiled = H200.compile(copy_pages, state, pairs, donate_argnums=0)
    memory = compiled.memory_analysis()
    print(f"{preset} {drafts}: {memory}")
    assert memory.alias_size_in_bytes >= cache_bytes((state.caches, state.drafter))
    of_rows = [
        math.prod(c.k.shape[1:]) * c.k.dtype.itemsize * pages_for(c.num_slots) for c in caches
    ]
    assert memory.temp_size_in_bytes < 2 * sum(of_rows)  # the pages that are copied


@pytest.mark.parametrize(("preset", "drafts"), [("31b", "chain"), ("26b-a4b", "mtp")])
def test_pages_come_back_from_host_memory_within_the_caches(preset: str, drafts: str) -> None:
    """Pages of all caches of one shape move as one array, and nothing else of their size is written."""
    state, caches = state_in_pages(preset, drafts)
    for slots in {c.num_slots for c in caches}:
        pages = {slots: jax.ShapeDtypeStruct((1, PAGES_A_COPY), jnp.int32)}
        copies = jax.eval_shape(lift_pages, state, pages)
        shapes = {(c.k.shape, c.k.dtype) for c in caches if c.num_slots == slots}
        assert len(copies) == len(shapes)
        compiled = H200.compile(lower_pages, state, copies, pages, donate_argnums=0)
        memory = compiled.memory_analysis()
        print(f"{preset} {drafts} {slots}: {memory}")
        assert memory.alias_size_in_bytes >= cache_bytes((state.caches, state.drafter))
        moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in copies)
        assert memory.temp_size_in_bytes < 2 * moved


def compile_pass(
    spec: DecodeSpec, slots: int, rows: int, tokens: int, *, images: bool = False
) -> tuple[Any, Any]:
    """Return a compiled pass over `rows` of many slots, and its abstract state.

    A pass of more tokens than a draft block has is a chunk of prompts. The others verify drafts.

    Args:
      images: whether the chunk has some, whose tokens see each other.
    """
    state = jax.eval_shape(
        lambda: states.init_state(
            spec, slots, cache_length=8320, num_stop_ids=4, cache_dtype=spec.target.cache_dtype
        )
    )
    numbers = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    of_row = numbers(rows)
    params, run = spec.target.abstract_params(), functools.partial(decode.prefill, spec)
    if tokens > 16:
        drafter = None if spec.drafter is None else spec.drafter.abstract_params()
        is_last = jax.ShapeDtypeStruct((rows,), bool)
        chunk = PrefillChunk(of_row, numbers(rows, tokens), of_row, of_row, is_last)  # type: ignore[arg-type]
        if images:
            shape = rows, tokens, spec.target.config.hidden_size
            of_images: Any = jax.ShapeDtypeStruct(shape, jnp.bfloat16), numbers(rows, tokens)
            chunk = dataclasses.replace(chunk, images=ImageTokens(*of_images, two_way=True))
        args = params, drafter, state, chunk
    else:

        def verify(params: Any, tokens: Any, caches: Any, start: Any, slots: Any) -> Any:
            target, _ = spec.bind(params, None)
            count = jnp.full_like(start, tokens.shape[1])
            return target(tokens, start, count, caches, slots=slots)

        run, args = verify, (params, numbers(rows, tokens), state.caches, of_row, of_row)
    options: dict[str, Any] = dict(donate_argnums=2, compiler_options=COMPILER_OPTIONS)
    return H200.compile(run, *args, **options), state


@NEEDS_MOSAIC
@pytest.mark.parametrize(
    ("preset", "drafts", "tokens", "fp8"),
    [
        ("31b", "none", 512, False),
        ("31b", "none", 16, False),
        ("31b", "none", 16, True),
        ("26b-a4b", "chain", 512, False),  # absorbs the chunk too
        ("26b-a4b", "none", 1, False),
        # Six more layers read the same keys and values. In fewer layers XLA copies no ring either
        # way.
        ("e4b", "mtp", 512, False),
    ],
)
def test_a_pass_over_a_few_of_many_slots_copies_no_cache(
    monkeypatch: pytest.MonkeyPatch, preset: str, drafts: str, tokens: int, fp8: bool
) -> None:
    """Kernels read the rows of the caches where they are, and write there: no gather, no second cache."""
    monkeypatch.setattr("pallas_kernels.attention.capability", lambda: 9.0)
    spec = small(preset, drafts)
    if preset == "e4b":
        twelve = dict(layer_types=(("sliding",) * 5 + ("full",)) * 2, num_kv_shared_layers=6)
        config = dataclasses.replace(spec.target.config, **twelve)  # type: ignore[arg-type]
        spec = dataclasses.replace(spec, target=dataclasses.replace(spec.target, config=config))
    if fp8:
        spec = dataclasses.replace(spec, target=with_kv_dtype(spec.target, "fp8"))
    slots, rows = 32, 4
    compiled, state = compile_pass(spec, slots, rows, tokens)
    memory = compiled.memory_analysis()
    print(f"{preset} {drafts}, {rows} of {slots} slots, {tokens} tokens: {memory}")
    caches = [cache for cache in state.caches if cache is not None]
    assert memory.alias_size_in_bytes >= cache_bytes(state.caches)
    hlo = compiled.as_text()
    moves = moves_of_caches(hlo, caches)
    if preset == "e4b":  # of the one ring that is lent, those layers get a copy of its four rows
        moves = [move for move in moves if not re.search(r" = \(?bf16\[4,(1,)?2,576,256\]", move)]
    assert moves == []


@NEEDS_MOSAIC
@pytest.mark.parametrize(
    ("preset", "drafts"),
    [("26b-a4b", "mtp"), ("31b", "chain"), ("31b", "none"), ("e4b", "mtp")],
)
def test_rows_that_decode_share_a_pass_over_prompts(
    monkeypatch: pytest.MonkeyPatch, preset: str, drafts: str
) -> None:
    """Drafts and prompts have their products and experts in common. No cache is copied."""
    monkeypatch.setattr("pallas_kernels.attention.capability", lambda: 9.0)
    spec, slots, rows = small(preset, drafts), 48, 32
    if preset == "e4b":  # half of the layers read keys and values of the others
        twelve = dict(layer_types=(("sliding",) * 5 + ("full",)) * 2, num_kv_shared_layers=6)
        config = dataclasses.replace(spec.target.config, **twelve)  # type: ignore[arg-type]
        spec = dataclasses.replace(spec, target=dataclasses.replace(spec.target, config=config))
    state = abstract_state(spec, slots, Paging(slots, 16 * 2048))
    numbers = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    is_last = jax.ShapeDtypeStruct((16,), bool)
    chunk = PrefillChunk(numbers(16), numbers(16, 64), numbers(16), numbers(16), is_last)  # type: ignore[arg-type]
    caches = caches_of((state.caches, state.drafter))
    tables = {c.num_slots: numbers(slots, pages_for(c.num_slots)) for c in caches}
    models = (m and m.abstract_params() for m in (spec.target, spec.drafter))
    args = *models, state, chunk, numbers(rows), None, tables
    options: dict[str, Any] = dict(donate_argnums=2, compiler_options=COMPILER_OPTIONS)
    compiled = H200.compile(functools.partial(mixed_step, spec), *args, **options)
    memory = compiled.memory_analysis()
    print(f"{preset} {drafts}: {memory}")
    assert memory.alias_size_in_bytes >= cache_bytes((state.caches, state.drafter))
    hlo = compiled.as_text()
    of_caches = "|".join({",".join(map(str, c.k.shape)) for c in caches})
    assert not re.findall(rf"\[(?:{of_caches})\]\S* (?:copy|copy-start|transpose|gather)\(", hlo)
    layers = len(spec.target.config.layer_types)
    calls = [line for line in hlo.splitlines() if " custom-call(" in line and "verify/" in line]
    assert sum("/qkv/pallas_call" in call for call in calls) == layers
    of_experts = sum("/experts_down/pallas_call" in call for call in calls)
    assert of_experts == (layers if preset == "26b-a4b" else 0)


@NEEDS_MOSAIC
def test_a_pass_with_images_takes_no_more_memory_than_one_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1,120 tokens that see each other have a kernel: their scores would take 330 MB a layer."""
    monkeypatch.setattr("pallas_kernels.attention.capability", lambda: 9.0)
    spec = small("31b", "none")
    needed = [
        compile_pass(spec, 32, 1, 1152, images=images)[0].memory_analysis().temp_size_in_bytes
        for images in (False, True)
    ]
    assert needed[1] < needed[0] + (8 << 20)


@pytest.mark.parametrize("preset", ["e4b", "12b", "31b"])
def test_the_largest_image_takes_no_more_memory_than_is_counted(preset: str) -> None:
    config = VISION_PRESETS[preset]
    vision, patches = model_def_of(config, "bfloat16"), 1120 * config.pool_size**2
    image = (
        jax.ShapeDtypeStruct((1, patches, 3 * config.patch_size**2), jnp.float32),
        jax.ShapeDtypeStruct((1, patches, 2), jnp.int32),
    )
    run, params = functools.partial(embed_images, vision), vision.abstract_params()
    compiled = H200.compile(run, params, *image, compiler_options=COMPILER_OPTIONS)
    assert compiled.memory_analysis().temp_size_in_bytes <= config.activation_bytes


def moves_of_caches(hlo: str, caches: list[Any]) -> list[str]:
    """List instructions that make all positions of a cache, but for writes in place."""
    sizes = {(str(cache.k.shape[2]), str(cache.k.shape[3])) for cache in caches}
    whole = {",".join(map(str, cache.k.shape)) for cache in caches}
    found = []
    for line in hlo.splitlines():
        match = _INSTRUCTION.match(line)
        if not match:
            continue
        _, _, dims, op = match.groups()
        has = set(dims.split(","))
        if any(positions in has and width in has for positions, width in sizes):
            in_place = dims in whole and op not in ("copy", "copy-start", "transpose", "gather")
            if not in_place:
                found.append(line.strip()[:160])
    return found


@pytest.mark.parametrize("format", ["int8", "fp8", "int4", "nvfp4"])
@pytest.mark.parametrize(
    ("preset", "batch", "drafts", "temporary_mb"),
    [
        ("26b-a4b", 1, "none", 8),
        ("26b-a4b", 32, "none", 144),  # of which logits of 32 rows, in three forms: 100 MB
        ("31b", 1, "none", 8),
        ("31b", 8, "chain", 512),  # logits of 128 rows: 134 MB, in some forms
        ("e4b", 8, "none", 32),
    ],
)
def test_quantised_weights_are_read_as_codes_and_never_written_out(
    preset: str, batch: int, drafts: str, temporary_mb: int, format: str
) -> None:
    """XLA must join each conversion with the product that reads the codes, and keep it in the loop."""
    spec = small(preset, drafts)
    formats = formats_for(spec.target, format, format)
    spec = dataclasses.replace(spec, target=spec.target.with_formats(formats))
    compiled, _ = compile_loop(spec, batch)
    memory = compiled.memory_analysis()
    print(f"{preset} {format}, batch {batch}: {memory}")
    assert memory.temp_size_in_bytes < temporary_mb << 20
    assert big_moves(compiled.as_text()) == []


@pytest.mark.parametrize(
    ("head", "format"),
    [(None, "int8"), (None, "fp8-dynamic"), (None, "int4"), ("int8", "fp8-dynamic")],
)
def test_a_head_for_drafts_alone_is_read_as_codes(head: str | None, format: str) -> None:
    """31B, 15 drafts of each of 8 rows. The limit is that of the target with a quantised head."""
    spec = small("31b", "chain")
    assert spec.drafter is not None
    target = spec.target.with_formats(formats_for(spec.target, tables=head))
    drafter = model_def_with_head(spec.drafter, target, format)
    spec = dataclasses.replace(spec, target=target, drafter=drafter)
    compiled, _ = compile_loop(spec, 8)
    memory = compiled.memory_analysis()
    print(f"31b, head {head}, drafts by {format}: {memory}")
    assert memory.temp_size_in_bytes < 512 << 20
    assert big_moves(compiled.as_text()) == []


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="the Mosaic kernels need jax 0.11.2")
@pytest.mark.parametrize("format", ["int8", "fp8", "int4"])
def test_a_pass_over_a_long_prompt_writes_no_weight_out(format: str) -> None:
    """31B's down projection of 2,048 tokens. In 16 bits the weight would have 231 MB."""
    rows, inputs, outputs = 2048, 21504, 5376
    weight = jax.ShapeDtypeStruct((inputs, outputs), jnp.bfloat16)
    weight = jax.eval_shape(
        functools.partial(quantise, format=format, contracting_axes=(0,)), weight
    )
    x = jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16)
    compiled = H200.compile(lambda x, w: w.multiply(x, x.dtype), x, weight)
    assert compiled.memory_analysis().temp_size_in_bytes < 100 << 20  # parts of sums


def test_norms_round_what_products_read_and_multiply_with_their_scales() -> None:
    """Attention and gates have a kernel that rounds; nothing else has one."""
    spec = small("31b", "none")
    formats = formats_for(spec.target, "fp8-dynamic")
    spec = dataclasses.replace(spec, target=spec.target.with_formats(formats))
    compiled, _ = compile_loop(spec, 8)
    hlo = compiled.as_text() or ""
    assert big_moves(hlo) == []
    layers = len(spec.target.config.layers)
    named = {n: len(re.findall(rf'name = "{n}"', hlo)) for n in ("add_norm", "qkv", "round_rows")}
    assert named == {"add_norm": 2 * layers, "qkv": layers, "round_rows": 2 * layers}


@pytest.mark.parametrize("rows", [32, 512])
def test_dynamic_products_multiply_8_bit_floats(rows: int) -> None:
    """The MLP of 31B: both operands are e4m3, and sums leave in 16 bits."""
    width, inner = 5376, 21504
    shapes = {"gate_up": (width, 2 * inner), "down": (inner, width)}
    weights = {
        name: jax.eval_shape(
            functools.partial(quantise, format="fp8-dynamic", contracting_axes=(0,)),
            jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        )
        for name, shape in shapes.items()
    }

    def mlp(x: jax.Array, weights: dict[str, Any]) -> jax.Array:
        gate, up = jnp.split(weights["gate_up"].multiply(x, x.dtype), 2, axis=1)
        return weights["down"].multiply(jax.nn.gelu(gate) * up, x.dtype)

    x = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
    hlo = H200.compile(mlp, x, weights, compiler_options=COMPILER_OPTIONS).as_text() or ""
    assert big_moves(hlo) == []
    dots = re.findall(r" dot\((.*)\), lhs", hlo) + re.findall(r'matmul.f8"', hlo)
    kernels = len(re.findall(r'custom_call_target="mosaic_gpu', hlo))
    assert kernels == (1 if rows == 32 and jax.__version_info__ >= (0, 11, 2) else 0)  # down's
    assert len(dots) + kernels == 2
    made = set(re.findall(r"= \(?(\w+)\[([\d,]+)\]", hlo))
    for shape in shapes.values():
        whole = f"{shape[1]},{shape[0]}"
        assert {dtype for dtype, made_shape in made if made_shape == whole} == {"f8e4m3fn"}
    if rows == 512:  # fewer rows are split among blocks, which add in float32
        outputs = re.findall(rf" (\w+)\[512,{2 * inner}\]\S* fusion\(", hlo)
        assert set(outputs) == {"bf16"}


@pytest.mark.parametrize(
    ("preset", "batch", "drafts", "temporary_mb"),
    [
        ("26b-a4b", 8, "none", 32),
        ("26b-a4b", 8, "chain", 448),  # of which logits of 128 rows, in three forms: 403 MB
        ("31b", 4, "mtp", 128),  # of which logits of 32 rows, in three forms: 100 MB
        ("31b", 1, "mtp tree", 48),
    ],
)
def test_caches_in_fp8_are_read_as_they_are(
    preset: str, batch: int, drafts: str, temporary_mb: int
) -> None:
    """Kernels write them and convert what they read: no cache is copied, or written out in 16 bits."""
    spec = small(preset, drafts)
    spec = dataclasses.replace(spec, target=with_kv_dtype(spec.target, "fp8"))
    compiled, state = compile_loop(spec, batch)
    memory = compiled.memory_analysis()
    print(f"{preset}, batch {batch}: {memory}")
    caches = [cache for cache in state.caches if cache is not None]
    assert {x.dtype for cache in caches for x in (cache.k, cache.v)} == {jnp.dtype("float8_e4m3fn")}
    assert memory.alias_size_in_bytes >= cache_bytes((state.caches, state.drafter))
    assert memory.temp_size_in_bytes < temporary_mb << 20
    hlo = compiled.as_text()
    assert big_moves(hlo) == []
    # What any operation makes of the shape of a cache is fp8, or a mask of it: nothing wider.
    shapes = {",".join(map(str, cache.k.shape)) for cache in caches}
    made = re.findall(r"= \(?(\w+)\[([\d,]+)\]", hlo)
    assert {dtype for dtype, shape in made if shape in shapes} <= {"f8e4m3fn", "pred"}


@pytest.mark.parametrize(("preset", "centroids"), [("e4b", True), ("26b-a4b", False)])
def test_an_assistant_with_centroids_never_has_logits_of_the_whole_vocabulary(
    preset: str, centroids: bool
) -> None:
    """Nor does it write out the rows of the head that it gathers: 2 MB a draft."""
    spec = dataclasses.replace(small(preset, "mtp"), drafting=Drafting(2))
    compiled, state = compile_loop(spec, 1)
    memory = compiled.memory_analysis()
    print(f"{preset}, centroids {centroids}: {memory}")
    assert memory.alias_size_in_bytes >= cache_bytes((state.caches, state.drafter))
    hlo = compiled.as_text()
    assert big_moves(hlo, limit_bytes=1 << 20 if centroids else LIMIT_BYTES) == []
    heads = [line for line in hlo.splitlines() if "mtp_head" in line]
    assert heads
    whole = [line for line in heads if re.search(r"= \(?\w+\[[\d,]*\b262144\b", line)]
    assert bool(whole) != centroids


@WORSE_WITH_012(reason="it joins no weights by default")
def test_a_join_of_weights_would_be_seen() -> None:
    """By default XLA merges products that share an input: the reason for COMPILER_OPTIONS."""

    def products(x: jax.Array, weights: list[jax.Array]) -> list[jax.Array]:
        return [jnp.tanh(x @ w) for w in weights]

    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((16, 2816), (2816, 2048)))
    for options, joined in ((None, True), (COMPILER_OPTIONS, False)):
        hlo = H200.compile(products, x, [w] * 5, compiler_options=options).as_text() or ""
        assert bool(big_moves(hlo)) == joined


IGNORES_SETMAXNREG = WORSE_WITH_012(reason="it ignores setmaxnreg, and wgmma waits for spills")


@NEEDS_MOSAIC
@pytest.mark.parametrize("page", [None, 2048, 64, 128])
@pytest.mark.parametrize(
    ("heads", "head_dim", "fresh", "kind"),
    [
        pytest.param((4, 8), 512, 0, jnp.bfloat16, marks=IGNORES_SETMAXNREG),
        pytest.param((4, 8), 512, 0, jnp.float8_e4m3fn, marks=IGNORES_SETMAXNREG),
        ((8, 8), 128, 16, jnp.bfloat16),
    ],
)
def test_the_mosaic_kernels_fit_and_keep_their_results_in_registers(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    heads: tuple[int, int],
    head_dim: int,
    fresh: int,
    kind: Any,
    page: int | None,
) -> None:
    """Layers of 31B take 227 KB of shared memory, and results half of all registers."""
    shape = (8, 16, *heads, head_dim)  # B T K G H

    def keys(size: int, page: int | None = None) -> tuple[Any, ...]:
        of_row = size // (page or size)
        k = jax.ShapeDtypeStruct((8 * of_row, heads[0], page or size, head_dim), kind)
        pages = None if page is None else jax.ShapeDtypeStruct((8, of_row), jnp.int32)
        return k, k, jax.ShapeDtypeStruct((8, size), jnp.int32), None, pages

    def attend(q: Any, at: Any, *segments: Any) -> jax.Array:
        segments = tuple(KVSegment(*s) for s in segments)
        return attention(q, at, segments, scale=1.0, causal=not fresh, implementation="mosaic")

    args = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        jax.ShapeDtypeStruct(shape[:2], jnp.int32),
        keys(2048, page),
        *([keys(fresh)] if fresh else []),
    )
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    H200.compile(attend, *args)
    spilled = re.findall(r"(\d+) bytes spill stores", "".join(capfd.readouterr()))
    # Some addresses are; what is contracting_axes takes 512 bytes of each thread.
    assert spilled
    assert max(map(int, spilled)) <= 64


@pytest.mark.parametrize("format", ["int8", "int4", "mxfp4"])
def test_quantising_takes_little_memory_beside_a_weight_and_its_codes(format):
    """At once, 26B-A4B's experts would take 0.5 GB more as int4, and 1.5 GB as mxfp4."""
    experts = jax.ShapeDtypeStruct((128, 2816, 2, 704), jnp.bfloat16)
    run = functools.partial(quantise_in_slices, format=format, contracting_axes=(1,))
    analysis = H200.compile(run, experts).memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 200e6


@pytest.mark.parametrize("stored", ["int8", "int4", "nvfp4"])
@pytest.mark.parametrize("format", ["int4", "fp8-dynamic"])
def test_a_copy_of_a_quantised_head_takes_little_memory(format: str, stored: str) -> None:
    """The table of 31B stands for 5.6 GB in float32."""
    table = jax.ShapeDtypeStruct((262_144, 5376), jnp.bfloat16)
    table = jax.eval_shape(functools.partial(quantise, format=stored, contracting_axes=(1,)), table)
    run = functools.partial(quantise_in_slices, format=format, contracting_axes=(1,))
    analysis = H200.compile(run, table).memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 80e6


@pytest.mark.parametrize(
    ("kind", "group", "scales"), [("int4", 32, "bfloat16"), ("e2m1", 32, "uint8")]
)
def test_four_bit_codes_and_their_scales_are_read_several_steps_ahead(
    kind, group, scales, tmp_path
):
    """No step waits for the memory: in the kernel's loop all reads are asynchronous.

    With scales read one step ahead, gate and up of 26B-A4B's experts took 54 us a layer at batch 1,
    to read 18 MB.
    """
    inputs, outputs = 2816, 8192
    weight = Codes(
        jax.ShapeDtypeStruct((inputs // 64, outputs, 32), jnp.uint8),  # type: ignore[arg-type]
        jax.ShapeDtypeStruct((inputs // group, outputs), scales),  # type: ignore[arg-type]
    )
    how: dict[str, Any] = dict(coding=Coding(kind, group), dtype=jnp.bfloat16)
    product = functools.partial(linear, **how, implementation="triton")
    rows = jax.ShapeDtypeStruct((2, inputs), jnp.bfloat16)
    loop = loop_of("grouped_linear", product, (rows, weight), tmp_path)
    assert loop.count("cp.async.c") >= 4
    assert "ld.global" not in loop


def loop_of(kernel: str, run: Any, args: Any, folder: Any) -> str:
    """Compile for an H200, and return the instructions of the only loop of a kernel."""
    # From the label of the loop to the jump back to it.
    [loop] = re.findall(
        r"\n(\$L\w+):(.*?)bra\S*\s+\1;", ptx_of(kernel, run, args, folder), re.DOTALL
    )
    return loop[1]


def ptx_of(kernel: str, run: Any, args: Any, folder: Any) -> str:
    """Compile for an H200, and return the instructions of a kernel."""
    options = {"xla_dump_to": str(folder), "xla_dump_emitter_re": ".*"}
    H200.compile(run, *args, compiler_options=options)
    texts = (path.read_text() for path in folder.glob("*.ptx"))
    [text] = [text for text in texts if f".entry {kernel}(" in text]
    return text


@pytest.mark.parametrize(
    ("kv_heads", "head_dim"), [(16, 256), (4, 512)], ids=["31B sliding", "31B full"]
)
def test_short_caches_are_read_without_a_wait_in_between(kv_heads, head_dim, tmp_path):
    """Queries, keys and values are all on their way before the kernel waits for any of them."""
    slots, groups = 384, 32 // kv_heads
    tiling = tiling_at_once(head_dim=head_dim, rows=groups, heads=kv_heads, longest=slots)
    assert tiling is not None
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    cache = shape((1, kv_heads, slots, head_dim))
    positions = jax.ShapeDtypeStruct((1, slots), jnp.int32)
    query, at = shape((1, 1, kv_heads, groups, head_dim)), jax.ShapeDtypeStruct((1, 1), jnp.int32)
    args = (query, at, (KVSegment(cache, cache, positions),))
    run = functools.partial(attention, scale=1.0, implementation="triton", tiling=tiling)
    before, _, _ = ptx_of("attention", run, args, tmp_path).partition("cp.async.wait_group")
    loaded = 16 * before.count("cp.async.cg.shared.global") * 32 * tiling.warps
    assert loaded >= 2 * tiling.keys * head_dim * 2  # bytes of keys and values
    assert "bar.sync" not in before
    assert "st.shared" not in before


@pytest.mark.parametrize("codes", ["int8", "float8_e4m3fn"])
def test_experts_of_8_bits_are_read_several_steps_ahead_and_not_converted(codes, tmp_path):
    """Numbers stay in registers from byte to product, without the slow instructions that convert.

    With them int8 gate and up of 26B-A4B took 27 us a layer at batch 1, to read 32 MB.
    """
    shape = jax.ShapeDtypeStruct
    weight = Codes(
        shape((128, 2, 704, 2816), codes),  # type: ignore[arg-type]
        factors=shape((128, 2, 704), jnp.float32),  # type: ignore[arg-type]
    )
    config = tiling_for(8 / 128, bits=8).gate_up
    assert isinstance(config, TileConfig)
    routed = jax.eval_shape(
        functools.partial(route, top_k=8, dtype=jnp.bfloat16, rows=config.rows),
        *(shape(s, jnp.float32) for s in ((1, 1, 128), (128,))),
    )
    run = functools.partial(multiply_gate_up, coding=None, top_k=8, config=config)
    args = (routed, shape((1, 2816), jnp.bfloat16), weight)
    loop = loop_of("experts_gate_up", run, args, tmp_path)
    assert loop.count("cp.async.c") >= 4
    assert "cvt.rn" not in loop
    # XLA of jax 0.11.2 loads the activations of a step directly: 2 KB that are in L2.
    assert loop.count("ld.global") <= 1
    assert loop.count("st.shared") <= 3


def compiled_eight_bits(rows: int, kind: Any, how: Any, options: Any = None) -> None:
    """Compile a product with codes of 8 bits, nearly the size of 31B's gate and up.

    No model has it. Mosaic says what it spills where it compiles a kernel for the first time only.
    """
    inputs, outputs = 4992, 43008
    args = (
        jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16),
        jax.ShapeDtypeStruct((outputs, inputs), kind),
        jax.ShapeDtypeStruct((outputs,), jnp.float32),
    )
    product = functools.partial(int8_matmul.linear, dtype=jnp.bfloat16, implementation=how)
    H200.compile(product, *args, compiler_options=options)


@pytest.mark.parametrize("kind", [jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("rows", [2, 32])
def test_eight_bit_codes_are_read_several_steps_ahead_and_converted_in_registers(
    rows: int, kind: Any, tmp_path: pathlib.Path
) -> None:
    """In the loop codes come by asynchronous copies, and no number goes back to memory."""
    options = {"xla_dump_to": str(tmp_path), "xla_dump_emitter_re": ".*"}
    compiled_eight_bits(rows, kind, "triton", options)
    paths = [p for p in tmp_path.glob("*.ptx") if "eight_bit_linear" in p.read_text()]
    [path] = paths
    [loop] = re.findall(r"\n(\$L\w+):(.*?)bra\S*\s+\1;", path.read_text(), re.DOTALL)
    assert loop[1].count("cp.async.c") >= 4
    for slow in ("ld.global", "st.shared", "cvt.rn", "ld.shared.b8", "ld.shared.v2.b8"):
        assert slow not in loop[1]
    folders = importlib.import_module("nvidia").__path__
    assembler = next((p for f in folders for p in pathlib.Path(f).glob("**/bin/ptxas")), None)
    if assembler is None:
        pytest.skip("there is no ptxas, which counts what is spilled")
    command = [assembler, "-v", "-arch=sm_90a", path, "-o", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert re.findall(r"(\d+) bytes spill stores", said) == ["0"]


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="the Mosaic kernels need jax 0.11.2")
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize(
    ("rows", "outputs"), [(8, 43008), (16, 43008), (32, 43008), (1, 4608), (8, 4608), (16, 4608)]
)
def test_few_rows_of_four_bit_codes_are_loaded_16_bytes_at_a_time(
    rows: int,
    outputs: int,
    group: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Nothing spills, and no instruction converts a code. The sizes are those of no model, as above.

    The smaller weight is one for the kernel of very few rows.
    """
    for name in ("MOSAIC_GPU_DUMP_PTX", "MOSAIC_GPU_DUMP_PTXAS"):
        monkeypatch.setenv(name, "1")
    blocks, shape = 76, jax.ShapeDtypeStruct
    codes = shape((blocks, outputs, 32), jnp.uint8)
    weight: Any = Codes(codes, shape((blocks * 64 // group, outputs), jnp.bfloat16))
    how: dict[str, Any] = dict(coding=Coding("int4", group), dtype=jnp.bfloat16)
    product = functools.partial(linear, implementation="mosaic", **how)
    H200.compile(product, shape((rows, 64 * blocks), jnp.bfloat16), weight)
    said = "".join(capfd.readouterr())
    assert set(re.findall(r"(\d+) bytes spill stores", said)) == {"0"}
    assert "mma.sync" in said
    assert "wgmma" not in said
    loads = set(re.findall(r"ld\.shared\.[\w.]+", said))
    parts = {"ld.shared.b32"} if outputs == 4608 else set()  # of sums, behind the loop
    assert loads == {"ld.shared.v4.b32", "ld.shared.b16"} | parts  # codes and rows, and scales
    assert not re.search(r"cvt\.\w+\.f32\.[su]8", said)
    steps_end_with_a_fence(said)


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="the Mosaic kernels need jax 0.11.2")
@pytest.mark.parametrize("format", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("rows", [2, 8])
def test_gate_and_up_of_few_rows_are_one_kernel(
    rows: int, format: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The activation is in it, and nothing spills."""
    for name in ("MOSAIC_GPU_DUMP_PTX", "MOSAIC_GPU_DUMP_PTXAS"):
        monkeypatch.setenv(name, "1")
    size = 2560, 2, 3584  # of no model, so that no other test has compiled it
    weight = jax.eval_shape(
        lambda: quantise(jnp.zeros(size, jnp.bfloat16), format, (0,)),
    )
    x = jax.ShapeDtypeStruct((1, rows, size[0]), jnp.bfloat16)
    compiled = H200.compile(lambda x, w: project_gated(x, w, "gelu_tanh"), x, weight)
    assert "gate_up" in compiled.as_text()
    assert " fusion(" not in compiled.as_text()
    said = "".join(capfd.readouterr())
    assert set(re.findall(r"(\d+) bytes spill stores", said)) == {"0"}
    steps_end_with_a_fence(said)


def steps_end_with_a_fence(ptx: str) -> None:
    """Check for a fence before a step is given back, or TMA writes over unread memory."""
    products = ptx[ptx.index("mma.sync") :]
    ends = [at.start() for at in re.finditer(r"mbarrier\.arrive\.release", products)]
    assert ends
    for end in ends:
        before = products[:end]
        fence, load = before.rfind("fence.proxy.async"), before.rfind("ld.shared")
        assert fence > load


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="the Mosaic kernels need jax 0.11.2")
@pytest.mark.parametrize("kind", [jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("rows", [2, 8])
def test_few_rows_of_eight_bit_codes_spill_nothing(
    rows: int, kind: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("MOSAIC_GPU_DUMP_PTX", "MOSAIC_GPU_DUMP_PTXAS"):
        monkeypatch.setenv(name, "1")
    compiled_eight_bits(rows, kind, "mosaic", {})
    said = "".join(capfd.readouterr())
    assert set(re.findall(r"(\d+) bytes spill stores", said)) == {"0"}
    assert not re.search(r"cvt\.\w+\.f32\.[su]8", said)
    steps_end_with_a_fence(said)


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="the Mosaic kernels need jax 0.11.2")
@pytest.mark.parametrize("rows", [40, 64, 128, 256, 512])
def test_many_rows_of_four_bit_codes_spill_nothing(
    rows: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing spills, and wgmma multiplies while the next numbers are made."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    blocks, outputs, shape = 78, 43008, jax.ShapeDtypeStruct
    of_weight: Any = (
        shape((blocks, outputs, 32), jnp.uint8),
        shape((2 * blocks, outputs), jnp.bfloat16),
    )
    weight, x = Codes(*of_weight), shape((rows, 64 * blocks), jnp.bfloat16)
    how: dict[str, Any] = dict(coding=Coding("int4", 32), dtype=jnp.bfloat16)
    product = functools.partial(linear, implementation="mosaic", **how)
    H200.compile(product, x, weight)
    said = "".join(capfd.readouterr())
    assert set(re.findall(r"(\d+) bytes spill stores", said)) == {"0"}
    assert "serialized" not in said


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="the Mosaic kernels need jax 0.11.2")
@pytest.mark.parametrize("size", ["31b qkv", "31b down"])
@pytest.mark.parametrize("rows", [1, 64, 128])
def test_rounded_rows_are_multiplied_without_a_conversion(
    rows: int, size: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Codes and rows are read by wgmma from shared memory, and its sums fit into registers."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    inputs, outputs = SHAPES[size]
    args = (jax.ShapeDtypeStruct((n, inputs), jnp.float8_e4m3fn) for n in (rows, outputs))
    product = functools.partial(int8_matmul.rounded_sums, dtype=jnp.bfloat16)
    H200.compile(functools.partial(product, implementation="mosaic"), *args)
    said = "".join(capfd.readouterr())
    assert set(re.findall(r"(\d+) bytes spill stores", said)) == {"0"}
    assert "serialized" not in said
    operands = re.findall(r"wgmma\.mma_async\S+e4m3\.e4m3 \{[^}]*\}, (\S+), (\S+),", said)
    assert operands
    assert all(left.startswith("%rd") for left, _ in operands)  # an address, and no registers


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="the Mosaic kernels need jax 0.11.2")
@pytest.mark.parametrize("kind", [jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("rows", [64, 128, 256, 512])
def test_many_rows_of_eight_bit_codes_spill_nothing(
    rows: int, kind: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """And wgmma is done with a step's registers before the next step writes them."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    compiled_eight_bits(rows, kind, "mosaic")
    said = "".join(capfd.readouterr())
    assert set(re.findall(r"(\d+) bytes spill stores", said)) == {"0"}
    assert set(re.findall(r"wgmma.wait_group.sync.aligned\s+(\d+)", said)) == {"0"}
    assert "serialized" not in said


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="the Mosaic kernels need jax 0.11.2")
@pytest.mark.parametrize("format", ["int8", "float8_e4m3fn", "int4"])
def test_experts_of_many_tokens_spill_nothing(
    format: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Gate and up, and down: wgmma multiplies while the next codes are converted."""
    *weights, coding = abstract_codes(GEMMA4_26B_A4B, format)
    shape, of, tokens = GEMMA4_26B_A4B, jax.ShapeDtypeStruct, 512
    args = (*abstract_inputs(shape, tokens), *weights, of((tokens,), jnp.bool_))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    run = functools.partial(experts, top_k=8, coding=coding, implementation="mosaic")
    compiled = H200.compile(run, *args)
    said = "".join(capfd.readouterr())
    assert re.findall(r"(\d+) bytes spill stores", said) == ["0", "0"]
    assert "serialized" not in said
    assert big_moves(compiled.as_text(), limit_bytes=64 << 20) == []  # no weight is copied


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="the Mosaic kernels need jax 0.11.2")
@pytest.mark.parametrize(
    ("format", "tokens"),
    [*(("int4", n) for n in (2, 8, 32, 128)), ("int8", 16), ("float8_e4m3fn", 16)],
)
def test_experts_of_few_tokens_run_as_many_blocks_as_they_are_cut_for(
    format: str, tokens: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Registers of a processor are enough for them, and none is spilled."""
    *weights, coding = abstract_codes(GEMMA4_26B_A4B, format)
    shape, of = GEMMA4_26B_A4B, jax.ShapeDtypeStruct
    args = (*abstract_inputs(shape, tokens), *weights, of((tokens,), jnp.bool_))
    for name in ("MOSAIC_GPU_DUMP_PTX", "MOSAIC_GPU_DUMP_PTXAS"):
        monkeypatch.setenv(name, "1")
    compiled = H200.compile(functools.partial(experts, top_k=shape.top_k, coding=coding), *args)
    said = "".join(capfd.readouterr())
    assert re.findall(r"(\d+) bytes spill stores", said) == ["0", "0"]
    tiling = mosaic_tiling_for(tokens * shape.top_k / shape.experts, 4 if coding else 8)
    assert tiling is not None
    steps_end_with_a_fence(said)
    used = [int(n) for n in re.findall(r"Used (\d+) registers", said)]
    for registers, config in zip(used, (tiling.gate_up, tiling.down), strict=True):
        assert isinstance(config, MmaConfig)
        threads = 128 * (config.groups + 1) * config.per_processor
        assert -(-registers // 8) * 8 * threads <= 65_536
    assert big_moves(compiled.as_text(), limit_bytes=64 << 20) == []  # no weight is copied


# --- other GPUs -----------------------------------------------------------------------------------

ON_OTHERS = pytest.mark.parametrize("chip", OTHERS, ids=lambda chip: chip.name)


@pytest.fixture
def chip_is_seen(chip: Chip, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the choice of kernels see the GPU that is compiled for."""
    for module in ("dispatch", "attention"):
        where = "pallas_kernels" + f".{module}.capability"
        monkeypatch.setattr(where, lambda: float(chip.capability))


@ON_OTHERS
@pytest.mark.usefixtures("chip_is_seen")
@pytest.mark.parametrize("head_dim", [128, 256, 512])
@pytest.mark.parametrize(
    ("kind", "tree"), [(jnp.bfloat16, False), (jnp.bfloat16, True), (jnp.float8_e4m3fn, False)]
)
def test_attention_fits_the_shared_memory_of_every_gpu(
    chip: Chip, head_dim: int, kind: Any, tree: bool
) -> None:
    """On an RTX 4090, 16 queries of E4B asked for 104 KiB of the 99 that there are: XLA gave up."""
    if kind == jnp.float8_e4m3fn and float(chip.capability) < 8.9:
        pytest.skip("fp8 needs compute capability 8.9")
    groups, kv_heads, shape = 8, 2, jax.ShapeDtypeStruct
    for tokens in (2, 4, 8, 16, 64, 512):
        batch = 8 if tokens == 512 else 1  # a chunk of prompts has tilings of its own

        def keys(slots: int, kind: Any = kind, batch: int = batch) -> tuple[Any, ...]:
            k = shape((batch, kv_heads, slots, head_dim), kind)
            return k, k, shape((batch, slots), jnp.int32)

        def attend(q: Any, at: Any, *segments: Any) -> jax.Array:
            segments = tuple(KVSegment(*s) for s in segments)
            return attention(q, at, segments, scale=1.0, implementation="triton")

        mask = shape((batch, tokens, tokens), jnp.bool_)
        chip.compile(
            attend,
            shape((batch, tokens, kv_heads, groups, head_dim), jnp.bfloat16),
            shape((batch, tokens), jnp.int32),
            keys(2048),
            *([(*keys(tokens), mask)] if tree else []),
        )


@ON_OTHERS
@pytest.mark.usefixtures("chip_is_seen")
@pytest.mark.parametrize("format", ["bfloat16", "int8", "int4"])
def test_experts_fit_the_shared_memory_of_every_gpu(chip: Chip, format: str) -> None:
    shape, of = GEMMA4_26B_A4B, jax.ShapeDtypeStruct
    numbers = tuple(
        of(sizes, jnp.bfloat16)
        for sizes in (
            (shape.experts, shape.width, 2, shape.hidden),
            (shape.experts, shape.hidden, shape.width),
        )
    )
    *weights, coding = (*numbers, None) if format == "bfloat16" else abstract_codes(shape, format)
    run = functools.partial(experts, top_k=8, coding=coding, implementation="triton")
    for tokens in (1, 8, 32, 128, 512, 2048):
        real = of((tokens,), jnp.bool_)
        chip.compile(run, *abstract_inputs(shape, tokens), *weights, real)


@ON_OTHERS
@pytest.mark.usefixtures("chip_is_seen")
@pytest.mark.parametrize(
    ("preset", "batch", "drafts", "format"),
    [
        ("e4b", 1, "mtp", None),
        ("e4b", 8, "mtp", "int8"),
        ("26b-a4b", 1, "chain", "int4"),
        ("26b-a4b", 1, "mtp tree", None),
        ("31b", 8, "chain", "int4"),
    ],
)
def test_the_loop_compiles_for_every_gpu(
    chip: Chip, preset: str, batch: int, drafts: str, format: str | None
) -> None:
    """And it copies neither weights nor caches there."""
    spec = small(preset, drafts)
    if format is not None:
        formats = formats_for(spec.target, format, "int8")
        spec = dataclasses.replace(spec, target=spec.target.with_formats(formats))
    compiled, state = compile_loop(spec, batch, chip=chip)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes((state.caches, state.drafter))
    assert big_moves(compiled.as_text()) == []
