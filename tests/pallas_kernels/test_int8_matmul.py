"""Products with 8-bit codes: the kernel against its plain reference, and how it is cut."""

from __future__ import annotations

import functools
import itertools
import math
import re
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.configs.gemma4 import PRESETS
from jaxspec.quantised import QuantisedArray
from jaxspec.weights.define import formats_for, model_def_of
from pallas_kernels.common.reference_ops import Activation
from pallas_kernels.common.tiles import (
    SHARED_BYTES,
    SmallMConfig,
    padded,
    results_are_apart,
    split_options,
)
from pallas_kernels.dispatch import H200_PROCESSORS
from pallas_kernels.int8_matmul import TileConfig, dequantise, gated, linear, rounded_sums
from pallas_kernels.int8_matmul.cases import SHAPES
from pallas_kernels.int8_matmul.tuning import (
    LINE,
    MAX_ROWS,
    ROWS,
    TABLE,
    MosaicConfig,
    config_for,
    gated_config_for,
    gated_is_faster,
    mosaic_config_for,
    mosaic_is_faster,
    sums_are_faster,
    sums_config_for,
    triton_is_faster,
)
from pallas_kernels.rounding import round_rows

KINDS = (jnp.int8, jnp.float8_e4m3fn)


def arguments(rows: int, inputs: tuple[int, ...], outputs: tuple[int, ...], kind) -> tuple:
    """Return rows, every code that is a number in any order, and scales."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (rows, *inputs), jnp.bfloat16)
    bits = jax.random.bits(keys[1], (*outputs, *inputs), jnp.uint8)
    if kind != jnp.int8:
        bits = jnp.where(bits & 127 == 127, 0, bits)  # that one is no number
    codes = jax.lax.bitcast_convert_type(bits, kind)
    return x, codes, jax.random.uniform(keys[2], outputs, jnp.float32, 0.5, 1.5) / 1024


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "config"),
    [
        (1, TileConfig(8, 64, inputs=128)),
        (5, TileConfig(8, 64, inputs=64, splits=3)),  # 5 steps: one, two and two
        (21, TileConfig(16, 32, inputs=64, splits=2)),
        (40, TileConfig(32, 64, inputs=64, splits=2)),
    ],
)
def test_the_kernel_is_dequantise_then_multiply(kind, rows, config):
    """Two axes of inputs and two of outputs, as attention has; sums differ by float32's rounding."""
    inputs = (5, 64) if config.inputs == 64 else (4, 64)
    x, codes, scales = arguments(rows, inputs, (2, 64), kind)
    weight = (codes.astype(jnp.float32) * scales[..., None, None]).reshape(128, -1)
    with jax.default_matmul_precision("highest"):
        expected = (x.astype(jnp.float32).reshape(rows, -1) @ weight.T).reshape(rows, 2, 64)
    how = dict(dtype=jnp.float32, interpret=True)
    out = linear(x, codes, scales, implementation="triton", config=config, **how)
    largest = float(jnp.max(jnp.abs(expected)))
    # 320 products of float32 numbers, in another order.
    assert float(jnp.max(jnp.abs(out - expected))) < 3e-6 * largest
    plain = linear(x, codes, scales, implementation="reference", **how)
    assert float(jnp.max(jnp.abs(plain - expected))) < 3e-6 * largest


def run_assembly(code: str, given: int) -> list[int]:
    """Return what assembly makes of a register: its results in the order of their numbers."""
    inputs = max(int(n) for n in re.findall(r"\$(\d)", code))
    registers = {f"${inputs}": given}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    def halves(name: str) -> np.ndarray:
        return np.array([value(name)], np.uint32).view(jnp.bfloat16).astype(np.float64)

    for line in code.strip("{} \n").split(";"):
        operation, *names = line.replace(",", " ").split() or [""]
        if operation in ("", ".reg"):
            continue
        to, *names = names
        match operation.split(".")[0]:
            case "mov":
                made = value(names[0])
            case "xor":
                made = value(names[0]) ^ value(names[1])
            case "and":
                made = value(names[0]) & value(names[1])
            case "shr":
                made = value(names[0]) >> value(names[1])
            case "lop3":
                assert names[3] == "0xea"  # (a & b) | c
                made = value(names[0]) & value(names[1]) | value(names[2])
            case "prmt":
                both = value(names[0]) | value(names[1]) << 32
                places = [value(names[2]) >> 4 * i & 15 for i in range(4)]
                made = sum((both >> 8 * place & 255) << 8 * i for i, place in enumerate(places))
            case "fma":
                x, y, z = (halves(name) for name in names)
                exact = x * y + z  # float64 holds it, but for the sign of a zero
                exact = np.where(
                    exact == 0, np.where(np.signbit(x * y) & np.signbit(z), -0.0, 0), exact
                )
                rounded = exact.astype(jnp.bfloat16)
                assert (rounded.astype(np.float64) == exact).all()
                made = int(rounded.view(np.uint32)[0])
            case _:
                raise AssertionError(line)
        registers[to] = made
    return [registers[f"${i}"] for i in range(inputs)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_assembly_converts_every_code_exactly(kind):
    """Four codes of a register become two registers of two bfloat16, in their order and `factor` less."""
    bits = np.arange(256, dtype=np.uint8)
    if kind != jnp.int8:
        bits = bits[bits & 127 != 127]
    bits = np.concatenate([bits, np.roll(bits, 5)])
    bits = bits[: len(bits) // 4 * 4].reshape(-1, 4)
    for four in bits:
        word = int(four.view(np.uint32)[0])
        exact = four.view(kind).astype(np.float32) / dequantise.factor(kind)
        expected = exact.astype(jnp.bfloat16).view(np.uint32).tolist()
        assert run_assembly(dequantise.assembly(kind), word) == expected
        assert run_assembly(dequantise.pair(kind), word & 0xFFFF) == expected[:1]


def test_the_kernel_refuses_what_it_cannot_cut():
    for rows, inputs, said in ((MAX_ROWS + 1, 64, "rows at most"), (2, 96, "multiples of 64")):
        x, codes, scales = arguments(rows, (inputs,), (64,), jnp.int8)
        with pytest.raises(NotImplementedError, match=said):
            linear(x, codes, scales, dtype=x.dtype, implementation="triton", interpret=True)
    wide = x.astype(jnp.float32)
    with pytest.raises(NotImplementedError, match="float32"):
        linear(wide, codes, scales, dtype=wide.dtype, implementation="triton")
    with pytest.raises(ValueError, match="codes must be"):
        linear(x, codes.T, scales, dtype=x.dtype)


@pytest.mark.parametrize("preset", ["e2b", "e4b", "12b", "26b-a4b", "31b"])
def test_every_product_of_every_target_is_cut_evenly(preset):
    """And has a name in `cases`, under which scripts measure it."""
    model_def = model_def_of(PRESETS[preset], "bfloat16")
    model_def = model_def.with_formats(formats_for(model_def, "int8", None))
    found = set()
    for name, weight in model_def.abstract_params().items():
        if not isinstance(weight, QuantisedArray) or "experts" in name:
            continue
        outputs = math.prod(weight.scales.shape)
        found.add((weight.codes.size // outputs, outputs))
    assert found == {size for name, size in SHAPES.items() if name.startswith(preset + " ")}
    for inputs, outputs in found:
        for rows in (1, *(row[0] for row in TABLE), 300, 512, 2048, 8192):
            config = config_for(rows, inputs, outputs)
            assert outputs % config.outputs == inputs % config.inputs == 0
            assert 1 <= config.splits <= inputs // config.inputs
            own = mosaic_config_for(rows, inputs, outputs)
            if isinstance(own, SmallMConfig):
                assert rows <= 8
                assert outputs % own.outputs == 0
                step = own.inputs * (own.outputs + 2 * (8 if rows > 2 else rows))
                assert own.per_processor * (own.stages * step + 1024) <= SHARED_BYTES
            elif own is not None:
                assert (
                    outputs % own.outputs == inputs % own.line == own.whole % H200_PROCESSORS == 0
                )
                assert own.whole < outputs // own.outputs * own.row_tiles
                assert own.whole % own.row_tiles == 0
                assert 1 <= own.splits <= inputs // LINE // 2
                assert own.stages >= 3
                assert results_are_apart(own, inputs // own.line)
                taken = padded(rows, ROWS * own.row_tiles) // own.row_tiles
                assert own.shared_bytes(taken, 2) <= SHARED_BYTES
            floats = sums_config_for(rows, inputs, outputs)
            assert (floats is None) == (rows > 128)
            if floats is not None:
                steps = inputs // floats.line
                assert outputs % floats.outputs == inputs % floats.line == floats.whole == 0
                assert steps // floats.splits >= 4
                assert floats.stages >= 3
                assert floats.shared_bytes(padded(rows, ROWS), 2) <= SHARED_BYTES


@pytest.mark.parametrize(
    ("name", "fp8", "kernels", "elsewhere"),
    [
        # X: XLA, T: Triton, M: Mosaic; for 8, 16, 32, 64, 128, 256 and 2048 rows. Then what is
        # taken where Mosaic's kernel cannot run.
        ("31b gate_up", False, "XMMMMMM", "XTTXXXX"),
        ("31b gate_up", True, "XXMXXMM", "XXTXXXX"),
        ("31b down", False, "TMMMMMM", "TTTXXXX"),
        ("31b down", True, "TMMMMMM", "TXTXXXX"),
        ("31b out", True, "TXMMMMM", "TXTXXXX"),
        ("31b out", False, "MMMMMMM", "TTTXXXX"),
        ("31b full qkv", False, "TMMMMMM", "TTTXXXX"),
        ("26b-a4b gate_up", False, "MMMMMMM", "TTTXXXX"),
        ("26b-a4b out", False, "MMMMMMM", "XTTXXXX"),
        ("26b-a4b down", False, "MMMMMMX", "TTTXXXX"),
        ("26b-a4b qkv", True, "MXMMMMM", "XXXXXXX"),
        ("e4b gate_up", False, "MMMMMMM", "XTTXXXX"),
        ("e4b gate_up", True, "XXMXXMM", "XXTXXXX"),
        ("e4b down", False, "XMMMMMM", "XTTXXXX"),
        ("e2b qkv", False, "XXXXXXX", "XXXXXXX"),
    ],
)
def test_a_kernel_is_taken_where_it_was_measured_to_be_faster(name, fp8, kernels, elsewhere):
    all_rows = 8, 16, 32, 64, 128, 256, 2048
    for rows, kernel, other in zip(all_rows, kernels, elsewhere, strict=True):
        sizes = rows, *SHAPES[name]
        assert triton_is_faster(*sizes, fp8=fp8) == (other == "T"), rows
        assert mosaic_is_faster(*sizes, fp8=fp8) == (kernel == "M"), rows
        assert kernel in ("M", other)


@pytest.mark.parametrize(
    ("name", "rows"),
    [("31b gate_up", 0), ("31b down", 64), ("31b out", 64), ("26b-a4b qkv", 0), ("e4b down", 0)],
)
def test_the_kernel_of_rounded_rows_is_taken_up_to_the_rows_for_which_it_was_faster(name, rows):
    for count in (1, 16, 64, 65, 512):
        assert sums_are_faster(count, *SHAPES[name]) == (count <= rows)


def test_products_of_rounded_rows_without_a_kernel_say_why():
    shape = jax.ShapeDtypeStruct
    x, codes = shape((4, 128), jnp.float8_e4m3fn), shape((128, 128), jnp.float8_e4m3fn)
    product = functools.partial(rounded_sums, dtype=jnp.bfloat16)
    assert jax.eval_shape(product, x, codes).shape == (4, 128)
    with pytest.raises(ValueError, match="do not have the same inputs"):
        jax.eval_shape(product, shape((4, 64), jnp.float8_e4m3fn), codes)
    product = functools.partial(product, implementation="mosaic")
    if jax.__version_info__ < (0, 11, 2):
        with pytest.raises(NotImplementedError, match=r"needs jax 0\.11\.2"):
            jax.eval_shape(product, x, codes)
        return
    for given, said in [
        (shape((4, 128), jnp.bfloat16), "is cut for float8_e4m3fn, not bfloat16"),
        (shape((200, 128), jnp.float8_e4m3fn), "has no cut for rows"),
    ]:
        with pytest.raises(NotImplementedError, match=said):
            jax.eval_shape(product, given, codes)


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="the Mosaic kernel needs jax 0.11.2")
def test_a_cut_whose_results_could_overwrite_each_other_is_refused():
    shape = jax.ShapeDtypeStruct
    weight = shape((43008, 5376), jnp.int8), shape((43008,), jnp.float32)
    config = MosaicConfig(splits=10, stages=6, whole=132)
    product = functools.partial(linear, dtype=jnp.bfloat16, implementation="mosaic", config=config)
    with pytest.raises(ValueError, match="a split 4 of 42 steps"):
        jax.eval_shape(product, shape((16, 5376), jnp.bfloat16), *weight)


def test_whole_tiles_come_first_where_that_leaves_less_to_split():
    """The ways to share 168 tiles among 132 processors, and the quickest one."""
    ways = split_options(168, 256, 16, tile_ns=44_000, max_splits=7)
    assert {(splits, whole) for _, splits, whole in ways} >= {(1, 0), (3, 0), (3, 132)}
    _, splits, whole = min(ways)
    assert whole == 132
    assert splits * (168 - whole) <= H200_PROCESSORS
    assert min(split_options(132, 256, 16, 44_000, 7))[1:] == (1, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "config"),
    [
        (1, SmallMConfig(blocks=4, stages=8)),
        (8, SmallMConfig(blocks=4, stages=6)),
        (16, SmallMConfig(groups=2, blocks=4, per_processor=3)),  # most warps at once
    ],
)
def test_a_product_gives_the_same_bits_every_time_on_a_gpu(rows, config, kind):
    """Of 100 runs some differed while TMA could write over a step that warps were still to read."""
    x, codes, scales = arguments(rows, (5376,), (43008,), kind)
    run = jax.jit(
        functools.partial(linear, dtype=jnp.float32, implementation="mosaic", config=config)
    )
    first = run(x, codes, scales)
    differing = [jnp.sum(run(x, codes, scales) != first) for _ in range(100)]
    assert not np.any(jax.device_get(differing))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHAPES)
def test_every_product_of_every_target_on_a_gpu(name, kind):
    """What "auto" takes is at most twice as far from float32 as XLA's product."""
    inputs, outputs = SHAPES[name]
    for rows in (1, 2, 5, 8, 16, 24, 64, 128, 256, 512):
        x, codes, scales = arguments(rows, (inputs,), (outputs,), kind)
        how = functools.partial(linear, dtype=jnp.bfloat16)
        with jax.default_matmul_precision("highest"):
            exact = jax.jit(functools.partial(how, implementation="reference", dtype=jnp.float32))(
                x.astype(jnp.float32), codes, scales
            )
        errors = [
            float(
                jnp.max(
                    jnp.abs(jax.jit(functools.partial(how, **choice))(x, codes, scales) - exact)
                )
            )
            for choice in (dict(), dict(implementation="reference"))
        ]
        assert errors[0] <= 2 * errors[1], (rows, errors)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in SHAPES if "gate_up" in name])
def test_gate_and_up_of_every_target_on_a_gpu(name, kind):
    """The kernel rounds gate and up before the activation, as the reference does."""
    inputs, outputs = SHAPES[name]
    for rows, activation in itertools.product((1, 2, 5, 8), get_args(Activation)):
        x, codes, scales = arguments(rows, (inputs,), (2, outputs // 2), kind)
        x, scales = x / math.sqrt(inputs), scales * (1 if kind == jnp.int8 else 16)
        how: Any = dict(activation=activation, dtype=jnp.bfloat16)
        ours, theirs = (
            jax.jit(functools.partial(gated, implementation=which, **how))(x, codes, scales).astype(
                jnp.float32
            )
            for which in ("mosaic", "reference")
        )
        error = jnp.linalg.norm(ours - theirs) / jnp.linalg.norm(theirs)
        assert float(error) < 5e-3, (rows, activation)  # 2^-9 each, for gate, up and the result


def test_gate_and_up_of_few_rows_have_one_kernel():
    """Two of its blocks fit on a processor at least, with 8 rows. Small ones were not measured."""
    assert gated_config_for(9, 10240) is None
    assert gated_config_for(8, 10248) is None
    assert [gated_is_faster(1024, outputs) for outputs in (2048, 4096)] == [False, True]
    config = gated_config_for(8, 10240)
    assert config is not None
    step = config.inputs * (2 * config.outputs + 2 * 8)
    parts = config.outputs * 2 * 4 * 8 * 4  # of the sums of four warps
    assert 2 * (config.stages * step + parts + 1024) <= SHARED_BYTES


def test_gate_and_up_of_other_shapes_are_refused():
    how: Any = dict(activation="silu", dtype=jnp.bfloat16)
    x, codes, scales = arguments(9, (128,), (3, 64), jnp.int8)
    with pytest.raises(ValueError, match=r"must be \[2, outputs\]; they are \(3, 64\)"):
        gated(x, codes, scales, **how)
    with pytest.raises(ValueError, match=r"must be \[2, outputs\]; they are \(64,\)"):
        gated(x, codes[0], scales[0], **how)
    with pytest.raises(ValueError, match="codes must be"):
        gated(x[:, :64], codes[:2], scales[:2], **how)
    with pytest.raises(NotImplementedError, match="up to 8 rows"):
        gated(x, codes[:2], scales[:2], implementation="mosaic", **how)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_every_product_of_rounded_rows_on_a_gpu(name):
    """The kernel is closer to float64 than XLA's product, whose sums stay in the tensor cores."""
    inputs, outputs = SHAPES[name]
    for rows in (1, 8, 16, 40, 64, 128):
        x, codes, _ = arguments(rows, (inputs,), (outputs,), jnp.float8_e4m3fn)
        x = round_rows(x).codes
        some = slice(0, outputs, outputs // 64)
        exact = np.asarray(x, np.float64) @ np.asarray(codes, np.float64)[some].T
        errors = []
        for how in ("mosaic", "reference"):
            product = functools.partial(rounded_sums, implementation=how)
            sums = jax.jit(functools.partial(product, dtype=jnp.float32))(x, codes)[:, some]
            errors.append(np.linalg.norm(np.asarray(sums) - exact) / np.linalg.norm(exact))
        assert errors[0] < max(1e-3, errors[1]), (rows, errors)
