"""Weights that a trainer holds: in trees of every shape, saved in either format, nothing half written."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import jaxspec
from checkpoints_convert import hf_io
from jaxspec.engine.engine import Engine
from jaxspec.models.gemma4 import Gemma4
from jaxspec.shapes import Params
from jaxspec.weights import saving
from jaxspec.weights.bridge import checkpoint_prefix, from_hf_names, to_hf_names
from jaxspec.weights.conversion import convert, write_weights
from jaxspec.weights.loading import CheckpointError, LoadedModel, load_drafter, load_target
from jaxspec.weights.model_def import ModelDef
from jaxspec.weights.trees import accept_params, flat_params
from tests import fakes, tiny
from tests.checkpoints_convert.hf_layout import TINY_DRAFTER, drafter_shapes, write


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    config = dataclasses.replace(tiny.config("31b"), layer_types=("sliding", "full"))
    model_def = ModelDef(Gemma4, config, "float32")
    return fakes.loaded(model_def, tiny.random_params(model_def, 0))


def nested(params: Params) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, x in params.items():
        *path, last = name.split(".")
        place = tree
        for part in path:
            place = place.setdefault(part, {})
        place[last] = x
    return tree


def same(found: Params, expected: Params) -> None:
    assert found.keys() == expected.keys()
    for name, x in found.items():
        assert isinstance(x, jax.Array), name
        assert x.dtype == expected[name].dtype, name
        np.testing.assert_array_equal(x, expected[name], err_msg=name)


# --- trees -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tree",
    [
        nested,
        lambda params: nested({name: np.asarray(x) for name, x in params.items()}),
        lambda params: {
            "layers": nested(params)["layers"],
            **{n: x for n, x in params.items() if "layers." not in n},
        },
    ],
    ids=["nested", "numpy", "half flat"],
)
def test_trees_are_flattened(tree: Any, model: LoadedModel):
    same(flat_params(tree(model.params)), model.params)


def test_a_state_and_a_module_of_nnx_are_flattened(model: LoadedModel):
    module = model.model_def.bind(model.params)
    same(flat_params(module), model.params)
    same(flat_params(nnx.state(module)), model.params)
    same(flat_params(nnx.to_pure_dict(nnx.state(module))), model.params)


def test_a_flat_dict_is_passed_on_as_it_is(model: LoadedModel):
    assert flat_params(model.params) is model.params


def test_models_and_engines_take_trees(model: LoadedModel):
    doubled = {name: 2 * x for name, x in model.params.items()}
    same(jaxspec.Pair(model).with_params(nested(doubled)).target.params, doubled)
    with pytest.raises(ValueError, match="final_norm: missing"):
        model.with_params({})
    with pytest.raises(ValueError, match="has no drafter to give weights to"):
        jaxspec.Pair(model).with_params(drafter={})
    engine = Engine(model, None, batch_size=1, cache_length=64)
    engine.target_params = nested(doubled)
    same(engine.target_params, doubled)
    with pytest.raises(ValueError, match="final_norm: missing"):
        engine.target_params = {n: x for n, x in doubled.items() if n != "final_norm"}
    same(engine.target_params, doubled)


def test_weights_are_cast_where_they_are_floats(model: LoadedModel):
    """Token ids stay what they are, and so does what the model definition does not know, for its check to name."""
    model_def = model.model_def.of_dtype("bfloat16")
    given = model.params | {"unknown": jnp.ones(2)}
    found = accept_params(model_def, nested(given), cast=True)
    assert found is not None
    assert found.pop("unknown").dtype == "float32"
    same(found, {name: x.astype("bfloat16") for name, x in model.params.items()})
    same(accept_params(model_def, nested(given), cast=False) or {}, given)
    with pytest.raises(ValueError, match="dtype must be float32 or bfloat16, not 'int8'"):
        jaxspec.Sampler(model, None, dtype="int8")


@pytest.mark.slow  # a sampler in bfloat16, and a gradient in either dtype
def test_samplers_take_trees_and_cast_them(model: LoadedModel):
    """Rollouts in bfloat16 of float32 weights; their scores are near, and gradients come in float32."""
    sampler = jaxspec.Sampler(
        model,
        None,
        max_new_tokens=6,
        program_features=jaxspec.ProgramFeatures(logprobs=True),
        dtype="bfloat16",
    )
    cast = {name: x.astype("bfloat16") for name, x in model.params.items()}
    prompts = jnp.asarray([[2, 17, 80, 33], [2, 99, 4, 7]])
    sampling = jaxspec.Sampling(temperature=1.0)
    result = sampler(nested(model.params), None, prompts, sampling)
    again = sampler(cast, None, prompts, sampling)  # what is bfloat16 already stays as it is
    np.testing.assert_array_equal(result.tokens, again.tokens)
    assert sampler.num_compilations == 1

    def loss(params: Any, dtype: str | None) -> jax.Array:
        found = jaxspec.score(sampler, params, (prompts, result), sampling, dtype=dtype)
        return jnp.sum(found.sampled)

    assert result.logprobs is not None
    expected = float(jnp.sum(result.logprobs.sampled))
    for dtype in (None, "float32"):
        value, slopes = jax.value_and_grad(loss)(nested(model.params), dtype)
        assert {str(x.dtype) for x in jax.tree.leaves(slopes)} == {"float32"}
        assert value == pytest.approx(expected, abs=1.0)


@pytest.mark.parametrize(
    ("tree", "say"),
    [
        ([1.0], "params are a list; expected a dict of arrays"),
        ({"a": {"b": 1.0}}, "a.b is a float; expected an array"),
        ({"a.b": np.ones(1), "a": {"b": np.ones(1)}}, "two arrays with the name a.b"),
    ],
)
def test_what_is_no_tree_of_arrays(tree: Any, say: str):
    with pytest.raises(ValueError, match=say):
        flat_params(tree)


# --- saving ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["model.language_model.", "model."])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A checkpoint of Hugging Face under one prefix or another, loaded."""
    config = tiny.hf_config("12b") | {"dtype": "bfloat16"}
    directory = tmp_path_factory.mktemp("source")
    model_def = ModelDef(Gemma4, tiny.config("12b"), "bfloat16")
    write_weights(
        tiny.config("12b"), tiny.random_params(model_def, 1), directory, prefix=request.param
    )
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"suppress_tokens": [7, 11]}))
    (directory / "tokenizer_config.json").write_text("{}")
    loaded = load_target(str(directory), dtype="bfloat16")
    assert checkpoint_prefix(loaded) == request.param
    return loaded


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trained_weights_come_back_from_either_format(
    dtype: str, source: LoadedModel, tmp_path: Path
):
    """In the dtype they have, under the prefix of the checkpoint they came from, with its small files."""
    trained = {name: (1.5 * x).astype(dtype) for name, x in source.params.items()}
    saving.save(tmp_path / "ours", source, nested(trained))
    saving.save_hf(tmp_path / "theirs", source, trained)
    for name in ("ours", "theirs"):
        again = load_target(str(tmp_path / name), dtype=dtype)
        same(again.params, trained)
        assert again.config == source.config
        assert again.generation == source.generation
        assert checkpoint_prefix(again) == checkpoint_prefix(source)
        assert (tmp_path / name / "tokenizer_config.json").read_text() == "{}"
    stored = load_file(tmp_path / "theirs" / "model.safetensors")
    assert stored.keys() == load_file(source.directory / "model.safetensors").keys()
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["dtype"] == dtype
    # What was saved in our format is saved in theirs from there.
    ours = load_target(str(tmp_path / "ours"), dtype=dtype)
    saving.save_hf(tmp_path / "theirs again", ours)
    one, two = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("theirs", "theirs again")
    )
    assert one == two


def test_a_drafter_is_saved_too(tmp_path: Path):
    write(tmp_path / "source", TINY_DRAFTER, drafter_shapes(TINY_DRAFTER))
    drafter = load_drafter(str(tmp_path / "source"), dtype="bfloat16")
    trained = {name: x + 1 for name, x in drafter.params.items()}
    saving.save(tmp_path / "ours", drafter, trained)
    saving.save_hf(tmp_path / "theirs", drafter, trained)
    for name in ("ours", "theirs"):
        same(load_drafter(str(tmp_path / name), dtype="bfloat16").params, trained)


@pytest.mark.parametrize(
    ("write_to", "module", "writer"),
    [(saving.save, saving, "save_params"), (saving.save_hf, hf_io, "write_tensors")],
)
def test_nothing_half_written_is_left(
    write_to: Any,
    module: Any,
    writer: str,
    source: LoadedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """The disk is full when the weights are written, but for the small files."""
    whole = getattr(module, writer)

    def full(*args: Any, **options: Any) -> None:
        whole(*args, **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, writer, full)
    with pytest.raises(CheckpointError, match=r"cannot be written: No space left"):
        write_to(tmp_path / "out", source)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("write_to", [saving.save, saving.save_hf])
def test_what_does_not_fit_is_not_saved(write_to: Any, source: LoadedModel, tmp_path: Path):
    with pytest.raises(ValueError, match=r"final_norm: bfloat16.3,., expected"):
        write_to(tmp_path / "out", source, source.params | {"final_norm": jnp.ones(3, "bfloat16")})
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists; name a destination that does not"):
        write_to(tmp_path / "out", source)


# --- names -------------------------------------------------------------------------------------------


def test_names_are_those_of_the_checkpoint_and_of_what_was_converted_from_it(
    source: LoadedModel, tmp_path: Path
):
    """No prefix is given: the files of the model say it, also after conversion."""
    stored = load_file(source.directory / "model.safetensors")
    convert(source.directory, tmp_path / "ours")
    for model in (source, load_target(str(tmp_path / "ours"), dtype="bfloat16")):
        tensors = to_hf_names(nested(model.params), model)
        assert tensors.keys() == stored.keys()
        same(from_hf_names(tensors, model), model.params)


@pytest.mark.slow  # torch
@pytest.mark.parametrize("name", ["e2b", "31b"])
def test_transformers_takes_the_names(name: str, tmp_path: Path):
    """`load_state_dict` knows every name. It lacks the tied head alone, which is the embedding itself."""
    import torch

    theirs = tiny.save(name, tmp_path)
    loaded = load_target(str(tmp_path), dtype="float32")
    trained = {n: 1.01 * x for n, x in loaded.params.items()}
    tensors = to_hf_names(trained, loaded)
    state = {n: torch.from_numpy(np.array(x)) for n, x in tensors.items()}
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert unexpected == []
    assert set(missing) <= {"lm_head.weight"}
    tokens = np.random.default_rng(0).integers(3, tiny.VOCAB_SIZE, (2, 9))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)).logits.numpy()
    found = fakes.forward(loaded.model_def, trained, jnp.asarray(tokens, jnp.int32))
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_the_public_names_are_functions():
    assert jaxspec.save is saving.save
    assert jaxspec.save_hf is saving.save_hf
