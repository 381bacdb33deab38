"""Drafting with a quantised copy of the target's head: what it changes, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from checkpoints_convert.errors import CheckpointError
from jaxspec import cache as kv
from jaxspec.api import Pair
from jaxspec.commands.bench import floor
from jaxspec.commands.bench.pair import make_pair
from jaxspec.commands.generate.rows import models_digest
from jaxspec.commands.models import ModelOptions
from jaxspec.configs.base import ConfigError
from jaxspec.configs.dflash import PRESETS as DFLASH_PRESETS
from jaxspec.configs.gemma4 import PRESETS
from jaxspec.drafters.dflash import DFlashWithHead
from jaxspec.options import Drafting, FieldError
from jaxspec.quantised import QuantisedArray
from jaxspec.quantised.array import quantise
from jaxspec.runtime import memory
from jaxspec.runtime.runtime import make_spec
from jaxspec.shapes import Array, Params
from jaxspec.weights.bridge import from_hf_names, to_hf_names
from jaxspec.weights.define import formats_for, model_def_of
from jaxspec.weights.draft_head import model_def_with_head, with_draft_head
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.model_def import ModelDef
from jaxspec.weights.sharding import make_mesh
from tests import fakes, tiny, tiny_qwen3
from tests.cases import slow
from tests.toy.target import Toy, ToyConfig

# What a format leaves of logits, norm-wise. Steps of random numbers: int8 1/127 of the largest of a
# channel, e4m3 1/16 of each number twice over, int4 1/8 of the largest of 32 numbers.
ERRORS = {"int8": 0.01, "fp8-dynamic": 0.05, "int4": 0.12}
PROMPTS = ["def read_config(path):", "class Queue:\n    def __init__(self", "import os\n"]


def generated(pair: Pair) -> list[Any]:
    # Texts of 48 tokens are 8 to 18 steps each: two or three steps fewer are 20 %.
    return pair.generate(PROMPTS, max_new_tokens=192, batch_size=3)


@pytest.fixture(scope="module")
def bundled() -> Pair:
    return jaxspec.load(dtype="float32")


@pytest.fixture(scope="module", params=["int8", *slow(*(f for f in ERRORS if f != "int8"))])
def copied(request: pytest.FixtureRequest) -> tuple[str, Pair]:
    return request.param, jaxspec.load(dtype="float32", quantize_draft_head=request.param)


@pytest.fixture(scope="module")
def plain(bundled: Pair) -> list[Any]:
    """The continuations of the target alone, which no copy of its head changes."""
    return generated(bundled.plain())


# --- decoding ----------------------------------------------------------------------------------------


def test_output_is_that_of_plain_decoding(
    bundled: Pair, copied: tuple[str, Pair], plain: list[Any]
) -> None:
    _, with_copy = copied
    whole, small = generated(bundled), generated(with_copy)
    assert [g.token_ids for g in small] == [g.token_ids for g in plain]
    for one, other in zip(whole, small, strict=True):
        assert other.acceptance_length > 1.5
        assert other.acceptance_length == pytest.approx(one.acceptance_length, rel=0.15)


def test_a_copy_changes_what_is_drafted_and_no_token(
    copied: tuple[str, Pair], plain: list[Any]
) -> None:
    """A copy of nothing: drafts are useless, and the output is the same."""
    _, with_copy = copied
    assert with_copy.drafter is not None
    params = with_copy.drafter.params
    useless = with_copy.with_params(
        drafter={**params, "head": jax.tree.map(jnp.zeros_like, params["head"])}
    )
    drafted = generated(useless)
    assert [g.token_ids for g in drafted] == [g.token_ids for g in plain]
    assert max(g.acceptance_length for g in drafted) < 1.2


def block_logits(drafter: LoadedModel, target: LoadedModel) -> np.ndarray:
    """Return the logits of two blocks without context."""

    def run(params: Params, target_params: Params) -> Array:
        module = drafter.model_def.bind(params)
        lengths = jnp.zeros(2, jnp.int32)
        state = module.init_state(2, cache_length=64, dtype=jnp.float32)
        context = tuple(kv.view(cache, lengths) for cache in state)
        return module.block_logits(
            context,
            target.model_def.bind(target_params),
            jnp.asarray([5, 9], jnp.int32),
            lengths,
            num_draft_tokens=3,
        )

    return np.asarray(jax.jit(run)(drafter.params, target.params), np.float64)


def test_logits_differ_by_the_rounding_of_the_format(
    bundled: Pair, copied: tuple[str, Pair]
) -> None:
    format, with_copy = copied
    assert bundled.drafter is not None
    assert with_copy.drafter is not None
    whole = block_logits(bundled.drafter, bundled.target)
    small = block_logits(with_copy.drafter, with_copy.target)
    error = np.linalg.norm(small - whole) / np.linalg.norm(whole)
    print(format, "error", error)
    assert 0 < error < ERRORS[format]


@pytest.mark.parametrize(
    ("model_def", "params", "name"),
    [
        pytest.param(*tiny.target("31b"), "embedder.table", id="gemma4"),
        pytest.param(*tiny.target("e2b"), "embedder.table", id="gemma4-per-layer"),
        pytest.param(*tiny_qwen3.target("qwen3-tied"), "table", id="qwen3-tied"),
        pytest.param(*tiny_qwen3.target("qwen3-untied"), "head_table", id="qwen3-untied"),
    ],
)
def test_the_copy_is_of_the_head(model_def: ModelDef, params: Params, name: str) -> None:
    """It is the table whose product with a row is `Target.head`, and it leaves that table alone."""
    target = fakes.loaded(model_def, params)
    drafter = fakes.dflash(target, block_size=4)
    with_copy = with_draft_head(drafter, target, "int8")
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(1, 3, model_def.config.hidden_size)), jnp.float32)
    logits = np.asarray(model_def.bind(params).head(x), np.float64)
    table = np.asarray(params[name], np.float64)
    np.testing.assert_allclose(logits, np.asarray(x, np.float64) @ table.T, rtol=1e-4, atol=1e-4)

    head = with_copy.params["head"]
    assert isinstance(head, QuantisedArray)
    expected = quantise(params[name], "int8", (1,))
    for part, array in expected.parts.items():
        np.testing.assert_array_equal(head.parts[part], array)
    assert target.params[name] is params[name]
    assert not params[name].is_deleted()
    assert with_copy.model_def.module is DFlashWithHead
    assert with_copy.config is drafter.config
    assert all(with_copy.params[n] is x for n, x in drafter.params.items())


@pytest.mark.parametrize(
    ("stored", "format"),
    [
        pytest.param("int4", "fp8-dynamic", marks=pytest.mark.slow),
        pytest.param("int8", "int4", marks=pytest.mark.slow),
        pytest.param("fp8", "fp8-dynamic", marks=pytest.mark.slow),
    ],
)
def test_a_copy_of_a_quantised_head(stored: str, format: str) -> None:
    """It is made of what the head stands for, and decodes as the target does without a drafter."""
    options: dict[str, Any] = dict(dtype="float32", quantize_head=stored)
    small = jaxspec.load(**options, quantize_draft_head=format)
    assert small.drafter is not None
    assert small.target.model_def.head is not None
    table = small.target.params[small.target.model_def.head]
    copy = small.drafter.params["head"]
    assert isinstance(table, QuantisedArray)
    assert isinstance(copy, QuantisedArray)
    assert (table.format, copy.format) == (stored, format)
    expected = jax.jit(lambda x: quantise(x, format, (1,)).parts)(table.dequantise())
    for part, array in expected.items():
        np.testing.assert_array_equal(copy.parts[part], array)
    plain, drafted = generated(small.plain()), generated(small)
    assert [g.token_ids for g in drafted] == [g.token_ids for g in plain]
    assert max(g.acceptance_length for g in drafted) > 1.5
    borrowed = make_spec(small.target, jaxspec.load(**options).drafter, Drafting())
    specs = borrowed, make_spec(small.target, small.drafter, Drafting())
    digests = {models_digest(spec, small.target, small.drafter) for spec in specs}
    assert len(digests) == 2


def test_the_rest_of_the_drafter_has_a_format_of_its_own() -> None:
    both = jaxspec.load(dtype="float32", quantize_drafter="int8", quantize_draft_head="int4")
    assert both.drafter is not None
    formats = dict(both.drafter.model_def.formats)
    assert formats.pop("head") == "int4"
    assert set(formats.values()) == {"int8"}
    assert both.drafter.model_def.storage == "int8 and float32, head int4"


# --- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(quantize_draft_head="int3"), "quantize_draft_head is 'int3'; expected one of int8"),
        (
            dict(drafter="none", quantize_draft_head="int8"),
            "quantize_draft_head was given, but there is no drafter: leave it out",
        ),
        (
            dict(drafter="mtp", quantize_draft_head="int8"),
            "an MTP assistant, does not: leave it out; quantize_drafter quantises a head",
        ),
        (
            dict(quantize_head="int8", quantize_draft_head="int8"),
            "is int8, and the target's head is int8 already, .*: leave this out, or choose another",
        ),
    ],
)
def test_what_is_refused_before_a_target_is_loaded(
    options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> LoadedModel:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr("jaxspec.api.load_target", never)
    with pytest.raises(FieldError, match=said):
        jaxspec.load(**options)


def test_a_format_that_the_gpu_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxspec.quantised.choice.capability", lambda: 8.0)
    with pytest.raises(FieldError, match=r"quantize_draft_head is fp8, which needs .*: use int8"):
        jaxspec.load(quantize_draft_head="fp8")


def test_a_copy_that_makes_the_same_drafts_is_refused() -> None:
    model_def, _ = tiny.target("31b")
    drafter = model_def_of(DFLASH_PRESETS["31b"], "float32")

    def stored(format: str) -> ModelDef:
        return model_def.with_formats(formats_for(model_def, tables=format))

    with pytest.raises(FieldError, match="is int4, and the target's head is int4 already"):
        model_def_with_head(drafter, stored("int4"), "int4")
    # This one rounds what it multiplies, which the target's own head does not.
    model_def_with_head(drafter, stored("fp8-dynamic"), "fp8-dynamic")


def test_a_target_that_names_no_head_is_refused() -> None:
    toy = ModelDef(Toy, ToyConfig(16, 16, 1, 16, 16), "float32")
    with pytest.raises(FieldError, match="Toy names no table as its head"):
        model_def_with_head(model_def_of(DFLASH_PRESETS["31b"], "float32"), toy, "int8")


def test_a_target_of_another_size_is_refused() -> None:
    target = fakes.loaded(*tiny.target("31b"))
    drafter = fakes.dflash(target, block_size=4)
    other = fakes.loaded(*tiny_qwen3.target("qwen3-untied"))
    with pytest.raises(ConfigError, match="hidden_size: drafter 48, target 72"):
        with_draft_head(drafter, other, "int8")


def test_a_copy_without_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = fakes.loaded(*tiny.target("31b"))
    drafter, mesh = fakes.dflash(target, block_size=4), make_mesh(devices=jax.devices()[:1])
    room = sum(memory.weight_bytes(m.model_def, mesh) for m in (target, drafter))
    monkeypatch.setattr("jaxspec.weights.memory.bytes_limit", lambda mesh: room)
    with pytest.raises(memory.DeviceMemoryError, match="the weights need"):
        with_draft_head(drafter, target, "int8")


# --- what is stored, counted and told ----------------------------------------------------------------


def test_a_copy_is_never_saved(copied: tuple[str, Pair], bundled: Pair, tmp_path: Any) -> None:
    drafter = copied[1].drafter
    assert drafter is not None
    assert bundled.drafter is not None
    for write in (jaxspec.save, jaxspec.save_hf):
        with pytest.raises(CheckpointError, match="was loaded with quantize_draft_head"):
            write(tmp_path / "saved", drafter)
    with pytest.raises(CheckpointError, match="was loaded with quantize_draft_head"):
        to_hf_names(drafter.params, drafter)
    assert not list(tmp_path.iterdir())
    # Weights from elsewhere come without a copy, which is kept by hand.
    trained = from_hf_names(to_hf_names(bundled.drafter.params, bundled.drafter), drafter)
    with pytest.raises(ValueError, match=r"head\.codes: missing"):
        drafter.with_params(trained)
    assert set(drafter.with_params({**drafter.params, **trained}).params) == set(drafter.params)


def test_a_step_reads_the_copy_in_place_of_the_head() -> None:
    target = ModelDef(tiny.target("31b")[0].module, PRESETS["31b"], "bfloat16")
    drafter = model_def_of(DFLASH_PRESETS["31b"], "bfloat16")
    numbers = PRESETS["31b"].vocab_size * PRESETS["31b"].hidden_size

    def cost(drafter: ModelDef) -> floor.StepCost:
        return floor.step_costs(make_spec(target, drafter), batch=2, context=256)[1]

    whole, small = cost(drafter), cost(model_def_with_head(drafter, target, "int8"))
    assert whole.weight_bytes - small.weight_bytes == pytest.approx(numbers, rel=1e-3)
    assert whole.flops == small.flops
    assert whole.kv_bytes == small.kv_bytes
    rounded = cost(model_def_with_head(drafter, target, "fp8-dynamic"))
    assert rounded.weight_bytes == small.weight_bytes
    assert small.flops - rounded.flops == pytest.approx(numbers * 2 * 15)  # 2 rows of 15 drafts


def test_memory_counts_the_copy_beside_the_head() -> None:
    target, _ = tiny.target("31b")
    drafter = fakes.dflash(fakes.loaded(target, {}), block_size=4).model_def
    mesh = make_mesh(devices=jax.devices()[:1])

    def weights(drafter: ModelDef) -> int:
        return memory.footprint(make_spec(target, drafter), 2, 64, mesh).weights

    copy = weights(model_def_with_head(drafter, target, "int8")) - weights(drafter)
    rows, width = target.config.vocab_size, target.config.hidden_size
    assert copy == rows * width + 4 * rows  # codes, and a scale a row


def test_random_weights_may_have_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    target = fakes.loaded(*tiny.target("31b"))
    config = fakes.dflash(target, block_size=4).config
    monkeypatch.setitem(PRESETS, "31b", target.config)
    monkeypatch.setitem(DFLASH_PRESETS, "31b", config)
    models = ModelOptions(drafter="dflash", dtype="float32", quantize_draft_head="int8")
    made = make_pair(models, Drafting(), "31b")
    assert made.drafter_params is not None
    assert made.drafter_params["head"].codes.dtype == jnp.int8
    assert made.target_name == "31b, random weights, draft head int8"
    assert made.spec.drafter is not None
    assert made.spec.drafter.storage == "float32, head int8"
    assert made.drafter_kind == "dflash"
    for wrong, said in (
        (dict(drafter="none"), "there is no drafter"),
        (dict(quantize_head="int8"), "the target's head is int8 already"),
        (dict(drafter="mtp"), "an MTP assistant, does not"),
    ):
        with pytest.raises(FieldError, match=said):
            make_pair(dataclasses.replace(models, **wrong), Drafting(), "31b")


def test_rows_of_other_formats_are_other_rows(bundled: Pair) -> None:
    """A run with `--json` must not take over what another head wrote, the target's or the drafter's copy of it."""

    def digest(pair: Pair) -> str:
        assert pair.drafter is not None
        spec = make_spec(pair.target, pair.drafter.model_def, Drafting())
        return models_digest(spec, pair.target, pair.drafter)

    options: tuple[dict[str, Any], ...] = (
        dict(quantize="int8"),
        dict(quantize_head="int8"),
        dict(quantize="int8", quantize_head="int8"),
        dict(quantize="int8", quantize_head="int4"),
        dict(quantize_drafter="int8"),
        dict(quantize_draft_head="int8"),
        dict(quantize_drafter="int8", quantize_draft_head="int8"),
    )
    pairs = [bundled, *(jaxspec.load(dtype="float32", **given) for given in options)]
    assert len({digest(pair) for pair in pairs}) == len(pairs)
    words = [pair.target.model_def.storage for pair in pairs[:5]]
    assert words == [
        "float32",
        "int8 and float32",
        "float32, head int8",
        "int8 and float32, head int8",
        "int8 and float32, head int4",
    ]
