"""Trees under Hugging Face names are what files have, and come back as they were, also inside jit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.api import BUNDLED
from jaxspec.registry import ModelConfig, recognise
from jaxspec.shapes import Params
from jaxspec.weights.bridge import from_hf_names, to_hf_names
from jaxspec.weights.conversion import write_weights
from jaxspec.weights.define import model_def_of
from jaxspec.weights.loading import CheckpointError, load_drafter, load_target
from tests import tiny
from tests.checkpoints_convert.hf_layout import TINY_DRAFTER

MODELS: dict[str, dict[str, Any]] = {
    **{size: tiny.hf_config(size) for size in tiny.FEATURE_SETS},
    **{f"{size}-mtp": tiny.hf_assistant_config(size) for size in tiny.FEATURE_SETS},
    "dflash": TINY_DRAFTER,
}


def _model(name: str) -> tuple[ModelConfig, Params]:
    config = recognise(MODELS[name]).read(MODELS[name], None)
    return config, tiny.random_params(model_def_of(config, "float32"), seed=3)


def _assert_same(tree: Any, expected: Any) -> None:
    assert set(tree) == set(expected)
    for name, array in tree.items():
        assert isinstance(array, jax.Array), name
        assert array.shape == expected[name].shape, name
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name: str, tmp_path: Path):
    config, params = _model(name)
    prefix = "model.language_model." if name in tiny.FEATURE_SETS else ""
    # In two programs: a layout for each shape would take several. The bundled models go there without.
    tensors = jax.jit(lambda params: to_hf_names(params, config))(params)
    write_weights(config, params, tmp_path, prefix=prefix, dtype="float32")
    _assert_same(tensors, load_file(tmp_path / "model.safetensors"))
    back = jax.jit(lambda tensors: from_hf_names(tensors, config))(tensors)
    _assert_same(back, params)
    model_def_of(config, "float32").check(back)


@pytest.mark.parametrize("name", ["target", "dflash", "mtp"])
def test_the_bundled_models(name: str):
    load = load_target if name == "target" else load_drafter
    model = load(str(BUNDLED / name), dtype="bfloat16")
    stored = load_file(BUNDLED / name / "model.safetensors")
    tensors = to_hf_names(model.params, model.config, prefix="model." if name == "target" else "")
    _assert_same(tensors, stored)
    _assert_same(from_hf_names(stored, model.config), model.params)


@pytest.mark.parametrize("name", ["e2b", "26b-a4b", "e2b-mtp", "dflash"])
def test_inside_jit(name: str):
    """A step of training on the other tree: everything moves, and nothing is a constant of the program."""
    config, params = _model(name)

    @jax.jit
    def doubled(params: Params) -> Params:
        tensors = to_hf_names(params, config)
        return from_hf_names({n: 2 * tensor for n, tensor in tensors.items()}, config)

    _assert_same(doubled(params), {name: 2 * np.asarray(x) for name, x in params.items()})


def test_gradients_pass():
    """Training code of another tree can take gradients through a bridge; a permutation's is its inverse."""
    config, params = _model("31b")
    tensors = jax.eval_shape(lambda params: to_hf_names(params, config), params)
    weights = {
        n: np.cos(np.arange(t.size, dtype=t.dtype)).reshape(t.shape) for n, t in tensors.items()
    }

    def loss(params: Params, weights: Params) -> jax.Array:
        named = to_hf_names(params, config)
        return sum(jnp.vdot(weights[n], t) for n, t in named.items())  # type: ignore[return-value]

    expected = jax.jit(lambda weights: from_hf_names(weights, config))(weights)
    _assert_same(jax.jit(jax.grad(loss))(params, weights), expected)


def test_every_parameter_that_does_not_fit_is_named():
    config, params = _model("31b")
    del params["layers.1.mlp.down"]
    params["layers.9.scalar"] = jnp.ones(1)
    params["final_norm"] = jnp.ones(7)
    with pytest.raises(ValueError, match="3 problems") as error:
        to_hf_names(params, config)
    assert str(error.value).splitlines() == [
        "params do not fit their config, 3 problems:",
        "  final_norm: shape [7], expected [48]",
        "  layers.1.mlp.down: missing",
        "  layers.9.scalar: not known",
    ]


def test_every_tensor_that_does_not_fit_is_named():
    config, params = _model("31b")
    tensors = to_hf_names(params, config, prefix="model.")
    del tensors["model.norm.weight"]
    tensors["model.layers.9.layer_scalar"] = jnp.ones(1)
    tensors["model.layers.0.self_attn.q_proj.weight"] = jnp.ones((3, 4))
    tensors["model.layers.0.mlp.down_proj.weight"] = jnp.ones((48, 64), jnp.int32)
    with pytest.raises(CheckpointError) as error:
        from_hf_names(tensors, config)
    assert str(error.value).splitlines() == [
        "the tree of tensors does not fit its config.json, 4 problems:",
        "  model.layers.0.mlp.down_proj.weight: dtype I32, expected one of F32, BF16, F16",
        "  model.layers.0.self_attn.q_proj.weight: shape [3, 4], expected [128, 48]",
        "  model.layers.9.layer_scalar: not known",
        "  model.norm.weight: missing",
    ]


def test_a_tied_head_is_left_out_and_another_is_refused():
    config, params = _model("12b")
    tensors = to_hf_names(params, config)
    table = tensors["model.language_model.embed_tokens.weight"]
    _assert_same(from_hf_names(tensors | {"lm_head.weight": table}, config), params)
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight differs from .*embed_tokens\.weight"
    ):
        from_hf_names(tensors | {"lm_head.weight": table + 1}, config)
