"""Four-bit formats: codes by hand, weights of files, and the kernel against its plain reference."""

from __future__ import annotations

import functools
import itertools
from typing import Any, get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from checkpoints_convert.quantised.stored_weights import as_pairs, low_first
from jaxspec import quantised
from jaxspec.commands.models import Quantized
from jaxspec.configs.gemma4 import PRESETS
from jaxspec.models.layers import project, project_gated, table_logits
from jaxspec.quantised import FormatError, array
from jaxspec.quantised.int4 import Grouped, from_float4, from_int4, int4_name
from jaxspec.weights.define import formats_for, model_def_of
from pallas_kernels.common import tiles
from pallas_kernels.common.reference_ops import Activation
from pallas_kernels.common.tile_schedule import schedule_for, tile_position
from pallas_kernels.common.tiles import SHARED_BYTES, SmallMConfig, padded, results_are_apart
from pallas_kernels.dispatch import H200_PROCESSORS
from pallas_kernels.experts import Tiling, experts
from pallas_kernels.int4_matmul import Codes, Coding, TileConfig, gated, linear
from pallas_kernels.int4_matmul.coding import E2M1, numbers, pack, pack_pairs, unpack
from pallas_kernels.int4_matmul.tuning import (
    ROWS,
    TABLE,
    MmaConfig,
    MosaicConfig,
    config_for,
    gated_config_for,
    mosaic_config_for,
    mosaic_is_faster,
)
from pallas_kernels.int8_matmul.cases import SHAPES
from tests.cases import slow
from tests.pallas_kernels.inputs import compiled, difference
from tests.pallas_kernels.inputs import experts as cases

FORMATS = ("int4", "int4-g64-zeros", "nvfp4", "mxfp4")


# Compiled whole: the test would else compile each of its operations.
quantise = jax.jit(array.quantise, static_argnums=(1, 2))
dequantise = jax.jit(lambda weight: weight.dequantise())


def random(shape: tuple[int, ...], seed: int = 0) -> jax.Array:
    return jax.device_put(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


# --- codes ----------------------------------------------------------------------------------------


def test_the_options_name_every_format_of_loading():
    assert get_args(Quantized) == quantised.names(on_load=True)


def test_the_sixteen_numbers_of_both_codings():
    codes = jnp.arange(16, dtype=jnp.uint8)
    assert numbers(codes, "int4").tolist() == list(range(-8, 8))
    assert numbers(codes, "e2m1").tolist() == [*E2M1, *(-x for x in E2M1)]
    assert np.signbit(numbers(codes, "e2m1")[8])


@pytest.mark.parametrize("inputs", [64, 96, 130, 704])
def test_codes_that_files_pair_are_packed_as_others(inputs):
    """In files neighbours share a byte, in a block those 32 apart. Past the inputs codes are 8."""
    codes = np.random.default_rng(0).integers(0, 16, (3, inputs)).astype(np.uint8)
    expected, pairs = pack(codes, 1), as_pairs(codes)
    np.testing.assert_array_equal(low_first(pairs), codes)
    np.testing.assert_array_equal(pack_pairs(pairs), expected)
    np.testing.assert_array_equal(jax.jit(pack_pairs)(pairs), expected)


@pytest.mark.parametrize(("shape", "axis"), [((3, 130), 1), ((64, 2, 5), 0), ((2, 40, 3), 1)])
def test_packed_codes_come_back(shape, axis):
    codes = np.random.default_rng(0).integers(0, 16, shape).astype(np.uint8)
    packed = pack(codes, axis)
    assert packed.shape == (*shape[:axis], -(-shape[axis] // 64), *shape[axis + 1 :], 32)
    unpacked = jax.jit(unpack, static_argnums=(1, 2))(packed, axis, shape[axis])
    np.testing.assert_array_equal(unpacked, codes)
    np.testing.assert_array_equal(jax.jit(pack, static_argnums=1)(codes, axis), packed)
    first = np.moveaxis(codes, axis, -1)[..., 1], np.moveaxis(codes, axis, -1)[..., 33]
    byte = np.take(packed, 0, axis)[..., 1]
    np.testing.assert_array_equal(byte, first[0] | first[1] << 4)


def test_codes_and_scales_are_those_of_the_formulas():
    """By hand: a scale per group of 32. The farthest number has the code -8, whatever its sign."""
    x = np.zeros((64, 1), np.float32)
    x[:3, 0] = [4.0, -1.0, 0.26]  # scale 4 / -8 = -0.5: q = -8, 2, -0.52 -> -1
    x[32:35, 0] = [-16.0, 14.0, 1.0]  # scale 2: q = -8, 7, 0.5 -> 0 (even)
    weight = quantise(jnp.asarray(x), "int4", (0,))
    assert weight.scales[:, 0].tolist() == [-0.5, 2.0]
    codes = unpack(weight.codes, 0, 64)[:, 0].astype(jnp.int32) - 8
    assert codes[:3].tolist() == [-8, 2, -1]
    assert codes[32:35].tolist() == [-8, 7, 0]
    floats = quantise(jnp.asarray(x), "mxfp4", (0,))
    # 4 / 6 rounds up to 2^0, 16 / 6 to 2^2.
    assert floats.scales[:, 0].tolist() == [127, 129]
    assert dequantise(floats)[:3, 0].tolist() == [4.0, -1.0, 0.5]
    assert dequantise(floats)[32:35, 0].tolist() == [-16.0, 16.0, 0.0]  # 0.25 is a tie: even
    small = quantise(jnp.asarray(x), "nvfp4", (0,))
    assert small.parts["factors"].tolist() == [np.float32(16 / 2688)]
    assert small.scales.astype(jnp.float32)[:, 0].tolist() == [112, 0, 448, 0]
    np.testing.assert_allclose(dequantise(small)[32:34, 0], [-16, 16], rtol=1e-6)


@pytest.mark.parametrize("format", [*FORMATS, "int4-g16", "int4-g128", "int4-zeros"])
def test_no_number_moves_by_more_than_half_a_step_of_its_group(format):
    """A step of integers is their scale. Of e2m1 the widest is from 4 to 6, a third of the largest."""
    x = random((130, 3)) * jnp.asarray([1.0, 1e-3, 50.0])
    weight = quantise(x, format, (0,))
    named = quantised.get_format(format)
    assert isinstance(named, Grouped)
    group = named.coding.group
    padded = np.pad(np.asarray(x), ((0, -130 % group), (0, 0))).reshape(-1, group, 3)
    low, high = np.minimum(padded.min(1), 0), np.maximum(padded.max(1), 0)
    largest = np.maximum(-low, high)
    half = {"int4": largest / 8, "nvfp4": largest / 6, "mxfp4": largest / 3}[format.split("-")[0]]
    if format.endswith("zeros"):
        half = (high - low) / 15  # a whole step, as the zero is rounded too
    error = np.abs(np.asarray(dequantise(weight) - x))
    assert (error <= 1.05 * np.repeat(half, group, 0)[:130]).all()
    assert not np.asarray(quantise(jnp.zeros((64, 2)), format, (0,)).dequantise()).any()


# --- products -------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["int4", "nvfp4", *slow("int4-g64-zeros", "mxfp4", "int4-g128")])
@pytest.mark.parametrize(
    ("shape", "inputs"), [((24, 5), 1), ((130, 2, 3, 8), 1), ((2, 3, 64, 24), 3)], ids=str
)
def test_a_product_equals_dequantise_then_multiply(format, shape, inputs):
    weight = quantise(random(shape), format, tuple(range(inputs)))
    rows = random((4, 6, *shape[:inputs]), 1)
    expected = np.tensordot(np.asarray(rows, np.float64), np.asarray(dequantise(weight)), inputs)
    found = jax.jit(project, static_argnames="inputs")(rows, weight, inputs=inputs)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "format", ["int4", "fp8-dynamic", None, *slow(*FORMATS[1:], "int8", "fp8")]
)
@pytest.mark.parametrize("activation", get_args(Activation))
def test_gate_and_up_are_activated_and_multiplied(format, activation):
    """Sums differ by float32's rounding. Rows of "fp8-dynamic" are rounded, by 6 % of a number at most."""
    numbers, x = random((128, 2, 24)), random((3, 5, 128), 1) / 8
    weight = numbers if format is None else quantise(numbers, format, (0,))
    if format is not None:
        numbers = dequantise(weight)
    gate, up = np.moveaxis(np.asarray(numbers, np.float64), 1, 0)
    a = np.asarray(x, np.float64) @ gate
    inner = a if activation == "silu" else np.sqrt(8 / np.pi) * (a + 0.044715 * a**3)
    expected = a / (1 + np.exp(-inner)) * (x @ up)
    gate = jax.jit(project_gated, static_argnums=2)
    found = gate(x, weight, activation)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < (0.06 if format == "fp8-dynamic" else 1e-6)
    alone = gate(x[:1, :1], weight, activation)
    np.testing.assert_allclose(alone, found[:1, :1], rtol=0, atol=1e-5)


def test_gate_and_up_of_other_shapes_are_refused():
    weight, coding = codes_of("int4", "bfloat16", False, True, 128, 48, 32)
    how: dict[str, Any] = dict(coding=coding, activation="silu", dtype=jnp.bfloat16)
    x = random((9, 128)).astype(jnp.bfloat16)
    three = Codes(weight.codes.reshape(2, 3, 16, 32), weight.scales.reshape(4, 3, 16))
    for other in (weight, three):
        with pytest.raises(ValueError, match=r"must be \[blocks, 2, outputs, 32\]; they are"):
            gated(x, other, **how)
    two = Codes(weight.codes.reshape(2, 2, 24, 32), weight.scales.reshape(4, 2, 24))
    with pytest.raises(ValueError, match="codes must be"):
        gated(x[:, :64], two, **how)
    for rows, said in (
        (9, "up to 8 rows"),
        (8, "a multiple of 16; there are 8 rows and 24 outputs"),
    ):
        with pytest.raises(NotImplementedError, match=said):
            gated(x[:rows], two, implementation="mosaic", **how)


@pytest.mark.parametrize("format", FORMATS)
def test_a_table_is_looked_up_and_multiplied_as_its_numbers(format):
    table = quantise(random((30, 80)), format, (1,))
    values, ids = dequantise(table), jnp.asarray([[3, 29, 0]])
    np.testing.assert_array_equal(table[ids], values[ids])
    rows = random((2, 5, 80), 1)
    expected = jnp.einsum("btd,vd->btv", rows, values, precision="highest")
    np.testing.assert_allclose(table_logits(rows, table), expected, rtol=0, atol=3e-5)


def codes_of(kind: str, scales: str, zeros: bool, first: bool, inputs: int, outputs: int, g: int):
    rng, axis = np.random.default_rng(0), 0 if first else 1

    def shape(count: int) -> tuple[int, int]:
        return (count, outputs) if first else (outputs, count)

    codes = jax.device_put(pack(rng.integers(0, 16, shape(inputs)).astype(np.uint8), axis))
    of_groups = shape(inputs // g)
    numbers_ = (
        rng.integers(124, 128, of_groups) if scales == "uint8" else rng.uniform(0.1, 0.2, of_groups)
    )
    zero = jnp.asarray(rng.integers(-8, 8, of_groups), jnp.int8) if zeros else None
    factors = jnp.linspace(0.5, 2, outputs) if scales == "float8_e4m3fn" else None
    return Codes(codes, jnp.asarray(numbers_, scales), zero, factors), Coding(kind, g)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "scales", "zeros", "group"),
    [
        ("int4", "bfloat16", False, 32),
        ("int4", "float16", True, 16),
        ("int4", "float32", True, 128),
        ("e2m1", "float8_e4m3fn", False, 16),
        ("e2m1", "uint8", False, 32),
    ],
)
@pytest.mark.parametrize(("rows", "early"), [(3, False), (20, True)])
def test_the_kernel_is_the_reference(kind, scales, zeros, group, rows, early):
    """Errors against float32, in bfloat16. Inputs are first in one case and last in the other."""
    weight, coding = codes_of(kind, scales, zeros, not early, 384, 32, group)
    x = random((rows, 384)).astype(jnp.bfloat16)
    how: dict[str, Any] = dict(coding=coding, inputs_first=not early, dtype=jnp.float32)
    config = TileConfig(8 if rows == 3 else 16, 16, splits=2, unroll=3, early=early)
    by_kernel = dict(implementation="triton", interpret=True, config=config)
    plain = compiled(functools.partial(linear, **how))
    ours = compiled(functools.partial(linear, **how, **by_kernel))(x, weight)
    theirs, exact = plain(x, weight), plain(x.astype(jnp.float32), weight)
    allowed = difference(theirs, exact)
    assert difference(ours, exact) <= 2 * allowed + 1e-5 * np.abs(exact).max()


def test_the_kernel_refuses_what_it_cannot_cut():
    weight, coding = codes_of("int4", "bfloat16", False, True, 96, 32, 32)
    how: dict[str, Any] = dict(coding=coding, dtype=jnp.float32, implementation="triton")
    with pytest.raises(NotImplementedError, match="multiple of 64"):
        linear(random((2, 96)), weight, **how, interpret=True)
    with pytest.raises(ValueError, match=r"scales must be \(4, 32\)"):
        linear(random((2, 128)), weight._replace(codes=jnp.tile(weight.codes, (1, 1, 1))), **how)


def test_the_mosaic_kernel_refuses_what_it_cannot_cut(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    how: dict[str, Any] = dict(dtype=jnp.float32, implementation="mosaic")

    def refused(match: str, rows: int = 64, outputs: int = 128, first: bool = True, **coding: Any):
        kind: dict[str, Any] = dict(kind="int4", scales="bfloat16", zeros=False, g=32) | coding
        weight, coded = codes_of(**kind, first=first, inputs=128, outputs=outputs)
        x = random((rows, 128)).astype(jnp.bfloat16)
        with pytest.raises(NotImplementedError, match=match):
            linear(x, weight, coding=coded, inputs_first=first, **how)

    refused("outputs that are a multiple of 128", outputs=192)
    refused("outputs that are a multiple of 128", outputs=24, rows=8)
    refused("inputs first", first=False)
    refused("groups of 32 and more without zeros", g=16)
    refused("groups of 32 and more without zeros", zeros=True)
    refused("groups of 32 and more without zeros", kind="e2m1")
    refused("takes bfloat16 scales", scales="float16")
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    refused("needs jax 0.11.2; this is")


@pytest.mark.parametrize("processors", [78, 114, H200_PROCESSORS])
@pytest.mark.parametrize("name", SHAPES)
def test_every_product_has_a_cut_for_the_mosaic_kernels(name, processors, monkeypatch):
    """On GPUs with as many processors as an H20, an H100 for PCIe and an H200 have."""
    monkeypatch.setattr(tiles, "processors", lambda: processors)
    inputs, outputs = SHAPES[name]
    for rows in (1, 8, 9, 17, 32, 33, 64, 100, 128, 129, 256, 300, 512, 2048, 8192):
        config = mosaic_config_for(rows, inputs // 64, outputs)
        assert config is not None
        if isinstance(config, SmallMConfig):
            assert rows <= 16
            assert outputs % config.outputs == 0
            taken = padded(rows, ROWS) if rows >= ROWS else rows
            step = config.blocks * (config.outputs * (32 + 4) + 128 * taken)
            assert config.per_processor * (config.stages * step + 1024) <= SHARED_BYTES
            continue
        assert isinstance(config, MmaConfig) == (rows <= 32)
        assert outputs % config.outputs == 0
        assert config.whole < outputs // config.outputs * config.row_tiles
        assert config.whole % config.row_tiles == config.whole % processors == 0
        assert config.stages >= 3
        assert inputs % config.inputs == 0
        assert results_are_apart(config, inputs // config.inputs)
        assert config.splits <= inputs // config.inputs
        taken = padded(rows, ROWS * config.row_tiles) // config.row_tiles
        assert config.shared_bytes(taken) <= SHARED_BYTES
        assert taken <= 256
        assert rows <= taken * config.row_tiles < rows + 8 * config.row_tiles


@pytest.mark.parametrize("processors", [*slow(114), H200_PROCESSORS])
@pytest.mark.parametrize(
    ("tiles", "steps", "config"),
    [
        (132, 42, MosaicConfig()),  # a whole tile each
        (44, 64, MosaicConfig(splits=3)),
        (50, 44, MosaicConfig(splits=3)),  # 150 parts: some blocks have two
        (168, 42, MosaicConfig(splits=3, whole=132)),
        (300, 7, MosaicConfig()),  # two or three whole tiles each
        pytest.param(
            *(672, 84, MosaicConfig(splits=9, whole=660, row_tiles=2)), marks=pytest.mark.slow
        ),
        (20, 5, MosaicConfig(row_tiles=4)),
    ],
)
def test_every_step_of_every_tile_is_multiplied_once(tiles, steps, config, processors):
    rest = tiles - config.whole if config.splits > 1 else 0
    blocks = min(processors, tiles - rest + rest * config.splits)
    multiplied, parts = [], []
    for block in range(blocks):
        schedule = schedule_for(jnp.int32(block), blocks, tiles, steps, config)
        loaded = jax.vmap(schedule.at)(jnp.arange(int(schedule.begins[-1]), dtype=jnp.int32))
        loaded = list(zip(*(np.asarray(x).tolist() for x in loaded), strict=True))
        mine = [schedule.whole(i) for i in range(int(schedule.wholes))] + list(schedule.parts)
        # What is loaded is what is multiplied, in this order.
        asked = [
            (int(share.tile), int(share.begin) + i)
            for share in mine
            for i in range(int(share.count))
        ]
        assert loaded == asked
        multiplied += loaded
        parts += [(s.out, int(s.tile), int(s.split)) for s in mine if s.count]
    assert sorted(multiplied) == sorted(itertools.product(range(tiles), range(steps)))
    assert len(set(parts)) == len(parts)  # no result is written twice
    places = {
        tuple(int(i) for i in tile_position(jnp.int32(tile), config)) for tile in range(tiles)
    }
    outputs, rows = range(tiles // config.row_tiles), range(config.row_tiles)
    assert places == set(itertools.product(outputs, rows))


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="the Mosaic kernels need jax 0.11.2")
@pytest.mark.parametrize("config", [SmallMConfig(groups=3), SmallMConfig(blocks=6)])
def test_a_cut_for_very_few_rows_that_does_not_fit_is_refused(config):
    weight, coding = codes_of("int4", "bfloat16", False, True, 384, 64, 32)
    x = random((8, 384)).astype(jnp.bfloat16)
    how: dict[str, Any] = dict(coding=coding, dtype=x.dtype, implementation="mosaic", config=config)
    with pytest.raises(ValueError, match="evenly, or blocks among 4 warps"):
        jax.eval_shape(lambda x, w: linear(x, w, **how), x, weight)
    how["config"] = MmaConfig(groups=1, pieces=1, row_tiles=2)
    with pytest.raises(ValueError, match="divides rows among tiles"):
        jax.eval_shape(lambda x, w: linear(x, w, **how), x, weight)


def test_few_rows_have_the_kernel_that_is_fastest():
    """By the table: rows of the kernel of very few rows, then those of the other Mosaic kernels."""
    sizes = {"31b out": (8, 11), "31b down": (0, 12), "26b-a4b qkv": (16, 3), "e4b down": (0, 5)}
    sizes |= {"31b gate_up": (0, 12), "31b qkv": (16, 3)}
    for name, (few, others) in sizes.items():
        inputs, outputs = SHAPES[name]
        faster = [rows for rows in range(1, 20) if mosaic_is_faster(rows, inputs // 64, outputs)]
        configs = [mosaic_config_for(rows, inputs // 64, outputs) for rows in faster]
        assert [isinstance(config, SmallMConfig) for config in configs] == [True] * few + [
            False
        ] * others
        assert faster[:few] == list(range(1, few + 1))
        assert all(rows >= ROWS for rows in faster[few:])
    wide = SmallMConfig(groups=2, per_processor=2)  # two warpgroups share rows
    assert [mosaic_config_for(rows, 84, 16384) for rows in (1, 8, 16)] == [wide] * 3
    assert [mosaic_config_for(rows, 44, 8192) for rows in (8, 16)] == [SmallMConfig(), wide]


@pytest.mark.parametrize("name", [name for name in SHAPES if "gate_up" in name])
def test_gate_and_up_of_few_rows_have_one_kernel(name):
    """Its blocks fit on a processor side by side."""
    inputs, outputs = SHAPES[name]
    assert gated_config_for(9, outputs // 2) is None
    for rows in (1, 8):
        config = gated_config_for(rows, outputs // 2)
        assert config is not None
        step = config.blocks * (2 * config.outputs * (32 + 4) + 128 * rows)
        parts = config.outputs * 2 * 4 * ROWS * 4  # of the sums of four warps
        assert config.per_processor * (config.stages * step + parts + 1024) <= SHARED_BYTES
        assert inputs >= config.inputs


@pytest.mark.gpu
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("name", [name for name in SHAPES if "gate_up" in name])
def test_gate_and_up_of_every_target_on_a_gpu(name, group):
    """The kernel rounds gate and up before the activation, as the reference does."""
    inputs, outputs = SHAPES[name][0], SHAPES[name][1] // 2
    weight, coding = codes_of("int4", "bfloat16", False, True, inputs, 2 * outputs, group)
    shapes = (-1, 2, outputs, 32), (-1, 2, outputs)
    weight = Codes(*(a.reshape(shape) for a, shape in zip(weight[:2], shapes, strict=True)))
    for rows, activation in itertools.product((1, 2, 5, 8), get_args(Activation)):
        x = (random((rows, inputs)) / np.sqrt(inputs)).astype(jnp.bfloat16)
        how: dict[str, Any] = dict(coding=coding, activation=activation, dtype=jnp.bfloat16)
        ours, theirs = (
            jax.jit(lambda x, w, how=how, which=which: gated(x, w, implementation=which, **how))(
                x, weight
            ).astype(jnp.float32)
            for which in ("mosaic", "reference")
        )
        error = jnp.linalg.norm(ours - theirs) / jnp.linalg.norm(theirs)
        assert float(error) < 5e-3, (rows, activation)  # 2^-9 each, for gate, up and the result


@pytest.mark.gpu
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("name", SHAPES)
def test_every_product_of_every_target_on_a_gpu(name, group):
    """The Mosaic kernels. Their numbers are those of the Triton kernel, added in another order."""
    inputs, outputs = SHAPES[name]
    weight, coding = codes_of("int4", "bfloat16", False, True, inputs, outputs, group)
    for rows in (1, 2, 5, 8, 13, 16, 25, 32, 33, 64, 100, 128, 200, 512):
        x = random((rows, inputs)).astype(jnp.bfloat16)
        how: dict[str, Any] = dict(coding=coding, dtype=jnp.float32)
        ours = jax.jit(lambda x, w, how=how: linear(x, w, implementation="mosaic", **how))(
            x, weight
        )
        theirs = jax.jit(lambda x, w, how=how: linear(x, w, implementation="triton", **how))(
            x, weight
        )
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * float(jnp.abs(theirs).max()))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "config"),
    [
        (8, SmallMConfig()),
        (8, MmaConfig(2, splits=6, blocks=2, stages=8, pieces=2)),
        (16, SmallMConfig(groups=2, per_processor=2)),
        (16, SmallMConfig(groups=3, blocks=4, stages=3, per_processor=3)),  # most warps at once
    ],
)
def test_a_product_gives_the_same_bits_every_time_on_a_gpu(rows, config):
    """Of 100 runs some differed while TMA could write over a step that warps were still to read."""
    outputs = 384 * 112
    weight, coding = codes_of("int4", "bfloat16", False, True, 5376, outputs, 32)
    x = random((rows, 5376)).astype(jnp.bfloat16)
    how: dict[str, Any] = dict(
        coding=coding, dtype=jnp.float32, implementation="mosaic", config=config
    )
    run = jax.jit(lambda x, w: linear(x, w, **how))
    first = run(x, weight)
    differing = [jnp.sum(run(x, weight) != first) for _ in range(100)]
    assert not np.any(jax.device_get(differing))


@pytest.mark.parametrize(
    "preset", ["26b-a4b", *slow(*(name for name in PRESETS if name != "26b-a4b"))]
)
def test_every_product_of_every_target_is_cut_evenly(preset):
    model_def = model_def_of(PRESETS[preset], "bfloat16")
    weights, declared = model_def.abstract_params(), model_def.declared()
    for name in formats_for(model_def, "int4", "int4"):
        w, contracting_axes = weights[name], declared[name].contracting_axes
        inputs = int(np.prod([w.shape[i] for i in contracting_axes]))
        outputs = int(np.prod([n for i, n in enumerate(w.shape) if i not in contracting_axes]))
        for rows, scale_bytes in itertools.product((2, 8, 16, 32, 64, 128, 512), (1, 2)):
            config = config_for(rows, inputs // 64, outputs, scale_bytes)
            assert inputs % (64 * config.splits * config.unroll) == 0, name
            assert outputs % config.outputs == 0
            # Else scales are loaded one step ahead only, and steps wait for the memory.
            four_bytes = config.outputs * scale_bytes >= 4 * 32 * config.warps
            assert rows > 16 or four_bytes or config.warps == 1, (name, config)
    assert TABLE[-1][0] == float("inf")


@pytest.mark.parametrize("format", ["int4", "nvfp4"])
def test_experts_read_codes_of_four_bits(format):
    """The kernels, interpreted, and the reference, against experts of the same numbers."""
    x, logits, scale, *weights = cases.inputs(cases.CODED, 5, jnp.dtype("float32"))
    packed = [quantise(w, format, (1,)) for w in weights]
    codes = [w.codes_of_experts()[0] for w in packed]
    coding = packed[0].codes_of_experts()[1]
    run = functools.partial(experts, top_k=3)
    expected = compiled(run)(x, logits, scale, *(dequantise(w) for w in packed))
    kernel = {"implementation": "triton", "interpret": True}
    shared = Tiling(8, TileConfig(8, 64, splits=3, early=True), TileConfig(8, 64, early=True))
    for how in ({"implementation": "reference"}, kernel, kernel | {"tiling": shared}):
        read = compiled(functools.partial(run, coding=coding, **how))
        found = read(x, logits, scale, *codes)
        np.testing.assert_allclose(found, expected, rtol=0, atol=3e-5)
    wrong = [c._replace(scales=c.scales[:, :1]) for c in codes]
    with pytest.raises(ValueError, match="gate_up_scales must be"):
        run(x, logits, scale, *wrong, coding=coding)


# --- files ----------------------------------------------------------------------------------------


def on_device(weight: quantised.QuantisedArray) -> quantised.QuantisedArray:
    return jax.tree.map(jnp.asarray, weight)


@pytest.mark.parametrize(
    ("scales", "zeros"), [("bfloat16", False), ("float16", True), ("float32", False)]
)
def test_integers_of_a_file_keep_codes_and_scales(scales, zeros):
    """The weight of an attention's output, [K, G, H, D]. A file has [D, K * G * H]."""
    rng, shape = np.random.default_rng(0), (2, 3, 64, 5)
    q = rng.integers(-8, 8, (5, 384)).astype(np.int8)
    s = rng.uniform(0.1, 1, (5, 12)).astype(ml_dtypes.bfloat16).astype(scales)
    z = rng.integers(-8, 8, (5, 12)).astype(np.int8) if zeros else None
    weight = from_int4(
        as_pairs((q + 8).astype(np.uint8)),
        s,
        z,
        shape=shape,
        contracting_axes=(0, 1, 2),
        dtype=jnp.float32,
    )
    assert weight.format == int4_name(32, scales, zeros)
    declared = quantised.get_format(weight.format).parts(shape, (0, 1, 2))
    assert {n: (a.shape, a.dtype) for n, a in weight.parts.items()} == {
        n: (a.shape, a.dtype) for n, a in declared.items()
    }
    expected = q.astype(np.float32) - (0 if z is None else np.repeat(z, 32, 1))
    expected = expected * np.repeat(s.astype(np.float32), 32, 1)
    np.testing.assert_array_equal(on_device(weight).dequantise(), expected.T.reshape(shape))


def test_floats_of_a_file_keep_codes_scales_and_factors():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (6, 128)).astype(np.uint8)
    s = rng.uniform(1, 448, (6, 8)).astype(ml_dtypes.float8_e4m3fn)
    factor = rng.uniform(0.001, 0.002, 6).astype(np.float32)
    how: dict[str, Any] = dict(shape=(128, 2, 3), contracting_axes=(0,), dtype=jnp.float32)
    weight = from_float4(as_pairs(codes), s, factor, **how)
    table = np.asarray([*E2M1, *(-x for x in E2M1)], np.float32)
    expected = table[codes] * np.repeat(s.astype(np.float32), 16, 1)
    np.testing.assert_allclose(
        on_device(weight).dequantise(), (expected * factor[:, None]).T.reshape(128, 2, 3), rtol=1e-6
    )
    exponents = rng.integers(120, 130, (6, 4)).astype(np.uint8)
    plain = from_float4(as_pairs(codes), exponents, **how)
    expected = table[codes] * np.repeat(2.0 ** (exponents.astype(np.float32) - 127), 32, 1)
    np.testing.assert_array_equal(on_device(plain).dequantise(), expected.T.reshape(128, 2, 3))


def test_files_that_do_not_fit_are_refused():
    how: dict[str, Any] = dict(shape=(96, 4), contracting_axes=(0,), dtype=jnp.float32)
    pairs = np.zeros((4, 48), np.uint8)
    with pytest.raises(FormatError, match=r"groups of 24 .*; expected groups of 32, 16, 64, 128"):
        from_int4(pairs, np.ones((4, 4), np.float32), **how)
    with pytest.raises(FormatError, match="scales of float64"):
        from_int4(pairs, np.ones((4, 3), np.float64), **how)
    with pytest.raises(FormatError, match="groups of 64, which do not divide 96 inputs"):
        from_int4(np.zeros((4, 64), np.uint8), np.ones((4, 2), np.float32), **how)
    with pytest.raises(FormatError, match="scales has 9 numbers, expected 12"):
        from_int4(pairs, np.ones((3, 3), np.float32), **how)
    with pytest.raises(FormatError, match="expected float8_e4m3fn and 16"):
        from_float4(pairs, np.ones((4, 3), np.float32), **how)


# --- meshes ---------------------------------------------------------------------------------------


def test_blocks_that_a_mesh_cannot_split_are_whole_everywhere():
    """26B-A4B's MLP has 2112 inputs of `down`: 33 blocks."""
    mesh = AbstractMesh((1, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    model_def = model_def_of(PRESETS["26b-a4b"], "bfloat16")
    model_def = model_def.with_formats(formats_for(model_def, "int4", "int4"))
    shardings = model_def.shardings(mesh)
    pairs = zip(*map(jax.tree.leaves, (shardings, model_def.abstract_params())), strict=True)
    for sharding, abstract in pairs:
        sharding.shard_shape(abstract.shape)  # every split divides
    assert tuple(shardings["layers.0.mlp.down"].codes.spec) == (None, None, None)
    assert tuple(shardings["layers.0.mlp.down"].scales.spec) == ("model", None)
    assert shardings["layers.0.experts.down"].codes.spec[0] == "model"
