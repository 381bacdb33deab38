"""Quantised weights: formats against their plain reference, and all that holds weights.

The reference of a format is to dequantise first and to multiply then. `bundled` is the bundled target in
each format, loaded once.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

import jaxspec
from jaxspec import quantised
from jaxspec.api import BUNDLED
from jaxspec.configs.gemma4 import PRESETS
from jaxspec.models.layers import project, table_logits
from jaxspec.options import FieldError
from jaxspec.quantised import QuantisedArray
from jaxspec.quantised import array as quantised_array
from jaxspec.quantised.array import named_arrays
from jaxspec.runtime import memory
from jaxspec.weights import conversion, loading
from jaxspec.weights.define import formats_for, model_def_of, quantised_def
from jaxspec.weights.loading import CheckpointError, LoadedModel
from jaxspec.weights.model_def import ModelDef
from jaxspec.weights.sharding import make_mesh
from pallas_kernels.experts import Tiling, experts
from pallas_kernels.experts.triton import Block
from pallas_kernels.int4_matmul import Codes, TileConfig
from tests import tiny
from tests.pallas_kernels.inputs import experts as cases

FORMATS = ("int8", "fp8")
# Half a step of the codes, over the largest magnitude of a channel. e4m3 has 3 bits after the point.
HALF_STEP = {"int8": 0.5 / 127, "fp8": 2.0**-4}


# One program each in place of one for every operation.
quantise = jax.jit(quantised_array.quantise, static_argnums=(1, 2))
dequantised = jax.jit(QuantisedArray.dequantise)
product = jax.jit(project, static_argnames="inputs")


def random(shape: tuple[int, ...], seed: int = 0) -> jax.Array:
    return jax.device_put(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def of_dtype(x: jax.Array, dtype: str) -> jax.Array:
    return jax.device_put(np.asarray(x).astype(jnp.dtype(dtype)))


# --- formats -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_no_number_moves_by_more_than_half_a_step_of_its_channel(format):
    x = np.asarray(random((40, 3, 8))) * np.asarray([1.0, 1e-3, 50.0], np.float32)[:, None]
    weight = quantise(x, format, (0,))
    assert weight.scales.shape == (3, 8)
    assert weight.codes.shape == (3, 8, 40)  # inputs last
    largest = np.abs(x).max(axis=0)
    numbers = np.asarray(dequantised(weight))
    assert (np.abs(numbers - x) <= HALF_STEP[format] * largest * 1.0001).all()
    # The largest number of a channel is exact, to rounding of the scale.
    kept = np.abs(numbers).max(axis=0)
    np.testing.assert_allclose(kept, largest, rtol=1e-6)


@pytest.mark.parametrize("format", FORMATS)
def test_a_channel_of_zeros_stays_zero_and_no_code_overflows(format):
    x = np.random.default_rng(0).normal(size=(64, 200)).astype(np.float32)
    x[:, 0] = 0
    x[:, 1] = 1e-42  # a subnormal scale
    weight = quantise(x, format, (0,))
    numbers = np.asarray(dequantised(weight))
    assert np.isfinite(numbers).all()
    assert not numbers[:, 0].any()


def test_codes_and_scales_are_those_of_the_formulas():
    """By hand: int8 has 127 steps up to the largest magnitude, e4m3 has 448 and four bits."""
    x = jnp.asarray([[-2.54, 0.0], [0.0301, 448.0], [1.0, 17.0]])
    whole = quantise(x, "int8", (0,))
    np.testing.assert_allclose(whole.scales, [0.02, 448 / 127], rtol=1e-6)
    assert whole.codes.tolist() == [[-127, 2, 50], [0, 127, 5]]  # a row for each output
    floats = quantise(x, "fp8", (0,))
    np.testing.assert_allclose(floats.scales, [2.54 / 448, 1.0], rtol=1e-6)
    # 17 lies between 16 and 18: even, of 16 = 1.000b and 18 = 1.001b, is 16.
    assert np.asarray(floats.codes, np.float32).tolist() == [[-448, 5.5, 176], [0, 448, 16]]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "inputs"), [((24, 5), 1), ((24, 2, 3, 8), 1), ((2, 3, 8, 24), 3)], ids=str
)
def test_a_product_equals_dequantise_then_multiply(format, dtype, shape, inputs):
    rows = of_dtype(random((4, 6, *shape[:inputs]), 1), dtype)
    weight = quantise(of_dtype(random(shape), dtype), format, tuple(range(inputs)))
    numbers = unrounded(weight)
    found = product(rows, weight, inputs=inputs)
    assert found.dtype == rows.dtype
    expected = np.tensordot(np.asarray(rows, np.float64), numbers, inputs)
    # Sums are float32 and rounded once, so one rounding of the result's dtype is all that differs.
    tolerance = 2e-5 if dtype == "float32" else 2.0**-8 * np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=0, atol=tolerance)


def test_dynamic_rounds_activations_with_a_scale_a_token():
    """By hand: rows of very different sizes each keep four bits of their own largest number."""
    rows = jnp.asarray([[448.0, 17.0, -1.0], [4.48e-3, 17e-5, -1e-5], [0.0, 0.0, 0.0]])
    weight = quantise(np.eye(3, dtype=np.float32), "fp8-dynamic", (0,))
    found = product(rows, weight)
    # 17 rounds to 16, as in the formulas of fp8.
    expected = [[448.0, 16.0, -1.0], [4.48e-3, 16e-5, -1e-5], [0.0, 0.0, 0.0]]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    table = quantise(np.eye(3, dtype=np.float32), "fp8-dynamic", (1,))
    np.testing.assert_allclose(jax.jit(table_logits)(rows, table), rows, rtol=1e-6)  # not of a head


def test_dynamic_rounds_its_sums_to_16_bits_and_no_further():
    """The sums are rounded before they meet their scales, and once more afterwards."""
    rows, weight = random((6, 64), 1), quantise(random((64, 32)), "fp8-dynamic", (0,))
    rows = of_dtype(rows, "bfloat16")
    found = product(rows, weight)
    assert found.dtype == rows.dtype
    expected = np.asarray(product(of_dtype(rows, "float32"), weight))
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, rtol=2.01 * 2.0**-8)


def unrounded(weight: QuantisedArray) -> np.ndarray:
    """Return the numbers that codes and scales stand for, before any rounding to 16 bits."""
    scales = np.expand_dims(np.asarray(weight.scales, np.float64), weight.contracting_axes)
    codes = np.asarray(weight.codes).astype(np.float64)
    first = weight.ndim - len(weight.contracting_axes)
    return np.moveaxis(codes, range(first, weight.ndim), weight.contracting_axes) * scales


@pytest.mark.parametrize("format", FORMATS)
def test_a_table_is_looked_up_and_multiplied_as_its_numbers(format):
    table = quantise(random((30, 16)), format, (1,))
    numbers, ids = np.asarray(dequantised(table)), np.asarray([[3, 29, 0]], np.int32)
    looked_up = jax.jit(lambda table, ids: table[ids])(table, ids)
    np.testing.assert_array_equal(looked_up, numbers[ids])
    rows = random((2, 5, 16), 1)
    expected = np.einsum("btd,vd->btv", rows, numbers)
    np.testing.assert_allclose(jax.jit(table_logits)(rows, table), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("platform", "multiplied"), [("cuda", 2), ("cpu", 1)])
def test_a_head_multiplies_a_lone_row_as_two_on_a_gpu(platform: str, multiplied: int):
    table, x = quantise(random((30, 16)), "int8", (1,)), random((1, 16), 1)
    run = jax.jit(table_logits)
    text = run.trace(x, table).lower(lowering_platforms=(platform,)).as_text()
    (dot,) = (line for line in text.splitlines() if "dot_general" in line)
    assert f"-> tensor<{multiplied}x30xf32>" in dot
    both = np.asarray(run(np.repeat(x, 2, axis=0), table))
    np.testing.assert_allclose(run(x, table), both[:1], rtol=0, atol=2e-5)


def pair(of: Iterable[Codes]) -> tuple[Codes, Codes]:
    gate_up, down = of
    return gate_up, down


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("how", ["reference", "triton"])
def test_experts_read_codes(format, how):
    x, logits, scale, gate_up, down = cases.inputs(cases.CODED, 5, jnp.dtype("float32"))
    quantised_ones = [quantise(w, format, (1,)) for w in (gate_up, down)]
    coded = (Codes(w.codes, factors=w.scales) for w in quantised_ones)
    options: dict[str, Any] = dict(top_k=cases.CODED.top_k, implementation=how)
    options["interpret"] = how == "triton"
    codes = pair(coded)
    run = functools.partial(experts, **options)
    run = jax.jit(run) if how == "reference" else run  # the kernel is one program as it is
    found = run(x, logits, scale, *codes)
    numbers = [dequantised(w) for w in quantised_ones]
    expected = run(x, logits, scale, *numbers)
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-5)
    if how == "triton":  # programs that share the inputs of gate and up, and more tokens than rows
        shared = Tiling(8, TileConfig(8, 64, splits=3), TileConfig(8, 64))
        in_columns = Tiling(16, Block(64, 64, 4, 4), Block(64, 64, 4, 4))
        both = Tiling(
            16, in_columns.gate_up, TileConfig(16, 64, unroll=2)
        )  # which has one step and a half
        many, of_many = jax.device_put((np.tile(x, (4, 1)), np.tile(logits, (1, 4, 1))))
        for tiling in (shared, in_columns, both):
            found = run(many, of_many, scale, *codes, tiling=tiling)
            np.testing.assert_allclose(found, np.tile(expected, (4, 1)), rtol=0, atol=3e-5)


def test_experts_refuse_codes_without_factors_and_with_wrong_ones():
    x, logits, scale, gate_up, down = cases.inputs(cases.CODED, 5, jnp.dtype("float32"))
    codes = [jnp.moveaxis(w, 1, -1).astype(jnp.int8) for w in (gate_up, down)]
    with pytest.raises(ValueError, match="must have one dtype"):
        experts(x, logits, scale, gate_up.astype(jnp.int8), down.astype(jnp.int8), top_k=3)
    with pytest.raises(ValueError, match="gate_up_factors must be"):
        experts(x, logits, scale, *pair(Codes(c) for c in codes), top_k=3)
    floats = pair(Codes(c.astype(jnp.float32), factors=down[:, 0]) for c in codes)
    with pytest.raises(ValueError, match="codes must be of one dtype"):
        experts(x, logits, scale, *floats, top_k=3)
    with pytest.raises(ValueError, match="both be codes"):
        experts(x, logits, scale, gate_up, Codes(codes[1], factors=down[:, 0]), top_k=3)


# --- models ------------------------------------------------------------------------------------------


def test_a_model_computes_with_codes_what_it_computes_with_their_numbers():
    """26B-A4B's features: experts, k = v, and a tied head that is quantised too."""
    model_def, params = tiny.target("26b-a4b")
    packed_def = model_def.with_formats(formats_for(model_def, "int8", "fp8"))
    packed = {name: packed_def.pack(name, x) for name, x in params.items()}
    formats = dict(packed_def.formats)
    assert formats["embedder.table"] == "fp8"
    assert formats["layers.0.experts.down"] == "int8"
    assert "layers.0.experts.router" not in formats
    assert "layers.0.pre_mlp_norm" not in formats

    def logits(model_def: ModelDef, params: Any) -> jax.Array:
        tokens, start = jnp.arange(6, dtype=jnp.int32)[None], jnp.zeros(1, jnp.int32)
        return model_def.bind(params)(tokens, start, jnp.full(1, 6, jnp.int32), None).logits

    run = jax.jit(logits, static_argnums=0)
    numbers = jax.jit(packed_def.dequantise)(packed)
    np.testing.assert_allclose(run(packed_def, packed), run(model_def, numbers), rtol=0, atol=2e-3)


def test_per_layer_inputs_stay():
    model_def = model_def_of(PRESETS["e2b"], "bfloat16")
    formats = formats_for(model_def, "int8", "int8")
    assert not any("per_layer" in name for name in formats)
    quantised_bytes = sum(
        a.size for name, a in model_def.abstract_params().items() if name in formats
    )
    # Of E2B's 4.6 billion numbers the table of per-layer inputs has 2.3.
    assert quantised_bytes > 2.2e9


def test_scales_lie_where_their_codes_do():
    """On a mesh an output that is split has its scales beside it; a split sum has them everywhere."""
    mesh = AbstractMesh((1, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    model_def = model_def_of(PRESETS["26b-a4b"], "bfloat16")
    model_def = model_def.with_formats(formats_for(model_def, "int8", "int8"))
    shardings = named_arrays(model_def.shardings(mesh))
    specs = {name: tuple(s.spec) for name, s in shardings.items()}
    assert specs["layers.0.attention.qkv.codes"] == ("model", None, None, None)
    assert specs["layers.0.attention.qkv.scales"] == ("model", None, None)
    assert specs["layers.0.attention.out.codes"] == (None, "model", None, None)
    assert specs["layers.0.attention.out.scales"] == (None,)
    assert specs["layers.0.experts.down.scales"] == ("model", None)
    assert specs["embedder.table.scales"] == ("model",)
    for name, array in named_arrays(model_def.abstract_params()).items():
        shardings[name].shard_shape(array.shape)  # every split divides


def test_memory_counts_a_byte_a_number():
    """31B in bfloat16 has 61 GB; its linears in int8 leave the embedding and little else as they were."""
    model_def, mesh = model_def_of(PRESETS["31b"], "bfloat16"), make_mesh(devices=jax.devices()[:1])
    whole = memory.weight_bytes(model_def, mesh)
    linears = memory.weight_bytes(model_def.with_formats(formats_for(model_def, "int8")), mesh)
    both = memory.weight_bytes(model_def.with_formats(formats_for(model_def, "int8", "fp8")), mesh)
    table = 2 * PRESETS["31b"].vocab_size * PRESETS["31b"].hidden_size
    assert math.isclose(linears, (whole - table) / 2 + table, rel_tol=1e-3)
    assert math.isclose(both, whole / 2, rel_tol=1e-3)


def test_random_weights_are_the_same_numbers_quantised():
    model_def, _ = tiny.target("31b")
    packed_def = model_def.with_formats(formats_for(model_def, "int8"))
    plain, packed = model_def.random_params(3), packed_def.random_params(3)
    name = "layers.1.mlp.down"
    expected = quantise(plain[name], "int8", (0,))
    np.testing.assert_array_equal(packed[name].codes, expected.codes)
    np.testing.assert_array_equal(packed["final_norm"], plain["final_norm"])


# --- loading and storage -----------------------------------------------------------------------------


@pytest.fixture(scope="module", params=FORMATS)
def bundled(request) -> LoadedModel:
    options = dict(quantize=request.param, quantize_head=request.param)
    return loading.load_target(str(BUNDLED / "target"), dtype="float32", **options)


def same(a: Any, b: Any) -> bool:
    a, b = named_arrays(a), named_arrays(b)
    return a.keys() == b.keys() and all(
        x.dtype == b[name].dtype and np.array_equal(np.asarray(x), np.asarray(b[name]))
        for name, x in a.items()
    )


def test_a_saved_model_comes_back_to_the_bit_in_any_dtype(bundled, tmp_path):
    jaxspec.save(tmp_path / "saved", bundled)
    manifest = json.loads((tmp_path / "saved" / "manifest.json").read_text())
    assert manifest["formats"]["layers.0.mlp.down"] in FORMATS
    assert (manifest["dtype"], manifest["compute_dtype"], manifest["cache_dtype"]) == (
        "float32",
    ) * 3
    back = loading.load_target(str(tmp_path / "saved"), dtype="float32")
    assert same(back.params, bundled.params)
    stored = {folder.name for folder in (tmp_path / "saved" / "params").iterdir()}
    assert stored >= set(named_arrays(bundled.params))  # files have an array in each folder
    assert back.model_def == bundled.model_def
    narrow = loading.load_target(str(tmp_path / "saved"), dtype="bfloat16")
    assert narrow.params["layers.0.mlp.down"].scales.dtype == jnp.float32
    assert narrow.params["final_norm"].dtype == jnp.bfloat16
    assert np.array_equal(
        narrow.params["layers.0.mlp.down"].codes, bundled.params["layers.0.mlp.down"].codes
    )
    on_mesh = loading.load_target(
        str(tmp_path / "saved"), dtype="float32", mesh=make_mesh(devices=jax.devices()[:1])
    )
    assert same(on_mesh.params, bundled.params)


def test_converting_quantises_as_loading_does(tmp_path):
    whole = loading.load_target(str(BUNDLED / "target"), dtype="float32")
    jaxspec.save_hf(tmp_path / "hf", whole)
    made = conversion.convert(tmp_path / "hf", tmp_path / "int8", quantize="int8")
    assert made.parameters == len(whole.params)
    stored = loading.load_target(str(tmp_path / "int8"), dtype="float32")
    loaded = loading.load_target(str(tmp_path / "hf"), dtype="float32", quantize="int8")
    assert same(stored.params, loaded.params)
    assert "embedder.table" in stored.params
    mesh = make_mesh(devices=jax.devices()[:1])
    placed = loading.load_target(str(tmp_path / "hf"), dtype="float32", quantize="int8", mesh=mesh)
    assert same(placed.params, loaded.params)
    with pytest.raises(CheckpointError, match="original numbers"):
        conversion.to_hf(tmp_path / "int8", tmp_path / "back")
    with pytest.raises(FieldError, match="quantised already, its weights are int8 and float32"):
        loading.load_target(str(tmp_path / "int8"), dtype="float32", quantize="fp8")


def test_loading_holds_one_weight_as_numbers_at_a_time(monkeypatch):
    """31B as numbers has 61 GB, which no 40 GB device could hold beside its codes."""
    held, before = [], sum(a.nbytes for a in jax.live_arrays())
    pack = ModelDef.pack

    def watched(model_def: ModelDef, name: str, weight: jax.Array) -> Any:
        held.append(sum(a.nbytes for a in jax.live_arrays()) - before)
        return pack(model_def, name, weight)

    monkeypatch.setattr(ModelDef, "pack", watched)
    model = loading.load_target(str(BUNDLED / "target"), dtype="float32", quantize="int8")
    codes = sum(a.nbytes for a in model.params.values())
    largest = max(4 * w.size for w in model.model_def.abstract_params().values())
    assert held
    assert max(held) <= codes + largest


def test_swapped_weights_may_be_quantised_arrays(bundled):
    nested: dict[str, Any] = {"layers": {}}
    for name, weight in bundled.params.items():
        first, _, rest = name.partition(".")
        (nested["layers"] if first == "layers" else nested)[rest if first == "layers" else name] = (
            weight
        )
    assert isinstance(nested["layers"]["0.mlp.down"], QuantisedArray)
    assert same(bundled.with_params(nested).params, bundled.params)


def test_arrays_of_a_weight_by_themselves_are_deprecated(bundled):
    """Params were flat dicts of arrays before they held quantised arrays."""
    with pytest.warns(DeprecationWarning, match=r"pass the QuantisedArray of a weight"):
        again = bundled.with_params(named_arrays(bundled.params))
    assert jax.tree.structure(again.params) == jax.tree.structure(bundled.params)
    assert same(again.params, bundled.params)


def test_a_model_refuses_codes_of_another_format(bundled):
    other = "fp8" if "int8" in bundled.model_def.storage else "int8"
    model_def = bundled.model_def.unquantised()
    model_def = model_def.with_formats(dict.fromkeys(dict(bundled.model_def.formats), other))
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.down\.codes: .*, expected"):
        model_def.check(bundled.params)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.down: missing"):
        bundled.model_def.unquantised().check(bundled.params)


# --- what is refused ---------------------------------------------------------------------------------


def test_unknown_formats_are_refused_with_those_that_are_known():
    with pytest.raises(FieldError, match="quantize is 'int3'; expected one of int8, fp8"):
        jaxspec.load(quantize="int3")
    with pytest.raises(FieldError, match="quantize_drafter was given, but there is no drafter"):
        jaxspec.load(drafter="none", quantize_drafter="int8")
    with pytest.raises(quantised.FormatError, match="'q4_k' is not known"):
        quantised.get_format("q4_k")
    with pytest.raises(ValueError, match=r"has no weight final_norm to quantise"):
        tiny.target("31b")[0].with_formats({"final_norm": "int8"})


@pytest.mark.parametrize(
    ("format", "found", "said"),
    [
        ("fp8", 8.0, "8.9; .* has 8.0: use int8"),
        ("int8", 7.5, "8.0; .* has 7.5: leave the weights"),
    ],
)
def test_a_gpu_too_old_is_refused_with_what_works_there(monkeypatch, format, found, said):
    """An A100 has no e4m3: XLA would write each weight out in bfloat16 in every step."""
    monkeypatch.setattr("jaxspec.quantised.choice.capability", lambda: found)
    with pytest.raises(FieldError, match=f"is {format}, which needs .* capability {said}"):
        jaxspec.load(quantize=format)


def test_a_file_that_a_gpu_is_too_old_for_is_refused_with_what_works_there(monkeypatch):
    """Nobody gave --quantize, so the message must not be about it."""
    monkeypatch.setattr("jaxspec.quantised.choice.capability", lambda: 8.0)
    model_def, _ = tiny.target("31b")
    stored = model_def.with_formats(formats_for(model_def, "fp8"))
    said = "the weights of 31b-fp8 are fp8, .* take a build in int8 or int4 or nvfp4 or mxfp4, or"
    with pytest.raises(CheckpointError, match=said):
        quantised_def(stored, "31b-fp8", None, None, "quantize")


def test_a_manifest_with_an_unknown_format_is_refused(bundled, tmp_path):
    jaxspec.save(tmp_path / "saved", bundled)
    file = tmp_path / "saved" / "manifest.json"
    values = json.loads(file.read_text())
    for wrong, said in (
        ({"layers.0.mlp.down": "int5"}, "formats is .*, which no conversion writes"),
        ({"final_norm": "int8"}, "no weight final_norm to quantise"),
    ):
        file.write_text(json.dumps({**values, "formats": wrong}))
        with pytest.raises(CheckpointError, match=said):
            loading.load_target(str(tmp_path / "saved"), dtype="float32")


# --- decoding ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["dflash", "mtp"])
@pytest.mark.parametrize("format", [*FORMATS, "int4", "int4-zeros", "nvfp4", "mxfp4"])
def test_decoding_is_lossless_against_the_quantised_target(format, drafter):
    """Plain and speculative passes multiply the same codes, so they choose the same tokens.

    Not so with fp8-dynamic, which rounds activations: where one lies between two numbers, the last
    bit of a sum decides, and passes of other widths add in another order.
    """
    pair = jaxspec.load(drafter=drafter, quantize=format, quantize_head=format, dtype="float32")
    prompts = ["def read_config(path):", "class Queue:\n    def __init__(self", "import os\n"]
    options: dict[str, Any] = dict(max_new_tokens=48, batch_size=3)
    speculative = pair.generate(prompts, **options)
    plain = pair.plain().generate(prompts, **options)
    assert [g.token_ids for g in speculative] == [g.token_ids for g in plain]
    assert max(g.acceptance_length for g in speculative) > 1.5
