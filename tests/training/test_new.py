"""New drafters: their configs, their first weights, and the files that they become."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.configs.base import ConfigError
from jaxspec.configs.gemma4 import PRESETS
from jaxspec.configs.qwen3 import PRESETS as QWEN3
from jaxspec.registry import family_of
from jaxspec.training import new, passes
from jaxspec.weights.conversion import convert, to_hf
from jaxspec.weights.define import model_def_of
from jaxspec.weights.loading import LoadedModel, load_drafter
from tests import fakes, tiny, tiny_pair
from tests.training.test_passes import SUPPRESSED

BLOCKS = ("dflash", "dflash2", "dspark")


def target() -> LoadedModel:
    model_def = model_def_of(tiny_pair.TARGET, "float32")
    return fakes.loaded(model_def, tiny.random_params(model_def, 1))


@pytest.mark.parametrize(
    ("kind", "container"),
    [*((kind, "z-lab") for kind in new.kinds()), *((k, "speculators") for k in BLOCKS)],
)
def test_files_of_a_new_drafter_load_and_come_back_to_the_byte(
    kind: str, container: str, tmp_path: Path
) -> None:
    config = new.new_config(kind, tiny_pair.TARGET, block_size=5, container=container)
    config.check_fits(tiny_pair.TARGET)
    model_def = model_def_of(config, "float32")
    params = new.start_params(model_def, target(), seed=0)
    (hf := tmp_path / "hf").mkdir()
    new.write_hf(hf, config, params, "float32")
    loaded = load_drafter(str(hf), dtype="float32")
    assert loaded.config == config
    for name, x in params.items():
        np.testing.assert_array_equal(loaded.params[name], x, err_msg=name)
    convert(hf, tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "again")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (hf / file).read_bytes()


def test_sizes_that_are_asked_for() -> None:
    target_config = PRESETS["26b-a4b"]
    wide: Any = new.new_config(
        "mtp", target_config, layers=6, hidden_size=512, intermediate_size=768, num_heads=64
    )
    assert wide.layer_types == ("sliding",) * 5 + ("full",)
    assert (wide.hidden_size, wide.intermediate_size, wide.num_heads) == (512, 768, 64)
    assert wide.backbone_hidden_size == target_config.hidden_size
    thin: Any = new.new_config("dflash", target_config, layers=2, intermediate_size=96, num_heads=8)
    assert (thin.num_layers, thin.intermediate_size, thin.num_heads) == (2, 96, 8)
    usual: Any = new.new_config("mtp", target_config)
    assert usual.num_layers == 4
    assert usual.num_heads == target_config.num_heads
    with pytest.raises(ConfigError, match="num_heads 3 is not a multiple"):
        new.new_config("mtp", target_config, num_heads=3)


@pytest.mark.parametrize("kind", BLOCKS)
def test_files_say_what_vllm_asks_for(kind: str, tmp_path: Path) -> None:
    """Without a verifier vLLM 0.26 refused speculators' files of ours. A DSpark drafter could not be loaded.

    Its DSpark has features for as many layers as there are, and sliding layers are causal. A list of answers to
    `causal` is True to it: what a DFlash file does not say, it takes for the kinds of the layers.
    """
    target_config = PRESETS["26b-a4b"]
    made: Any = new.new_config(kind, target_config, container="speculators")
    if kind == "dspark":
        assert len(made.feature_layers) == made.num_layers == 5
        assert made.causal == (True, True, True, True, False)
    else:
        assert made.causal == (False,) * 5
    small = new.new_config(kind, tiny_pair.TARGET, block_size=5, container="speculators")
    params = new.start_params(model_def_of(small, "float32"), target(), seed=0)
    (of_target := tmp_path / "target").mkdir()
    (of_target / "config.json").write_text('{"architectures": ["Gemma4ForCausalLM"]}')
    loaded = dataclasses.replace(target(), directory=of_target, source="some/target")
    (hf := tmp_path / "hf").mkdir()
    new.write_hf(hf, small, params, "float32", loaded)
    values = json.loads((hf / "config.json").read_text())
    assert values["speculators_config"]["verifier"] == {
        "name_or_path": "some/target",
        "architectures": ["Gemma4ForCausalLM"],
    }
    assert load_drafter(str(hf), dtype="float32").config == small
    of_zlab: Any = new.new_config(kind, target_config)
    for causal in ((True, True, True, True, False), (False, True, True, True, False)):
        mixed = dataclasses.replace(of_zlab, causal=causal)
        values = new.hf_config(mixed)[0]
        left_out = kind == "dflash" and causal[0]
        assert values["dflash_config"].get("causal") == (None if left_out else list(causal))
        assert family_of(mixed).read(values, None) == mixed


@pytest.mark.parametrize("kind", new.kinds())
def test_every_released_size_has_a_config(kind: str) -> None:
    """Of Qwen3, which has no layers with windows, there are no assistants."""
    for config in PRESETS.values():
        made: Any = new.new_config(kind, config)
        made.check_fits(config)
        family = family_of(made)
        assert family.read(*new.hf_config(made)) == made
    qwen = next(iter(QWEN3.values()))
    if hasattr(made, "block_size"):
        new.new_config(kind, qwen, layers=2).check_fits(qwen)
    else:
        with pytest.raises(ConfigError, match="needs a target of Gemma 4"):
            new.new_config(kind, qwen)


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_a_drafter_that_starts_from_dflash_first_drafts_as_that_does(kind: str) -> None:
    """The base scores are equal: convolutions are the identity, and biases are 0."""
    of_dflash = model_def_of(tiny_pair.DRAFTER, "float32")
    begun = tiny.random_params(of_dflash, 2)
    config = new.config_from(kind, tiny_pair.DRAFTER)
    assert family_of(config).name == kind
    model_def = model_def_of(config, "float32")
    params = new.start_params(model_def, target(), 0, begun)
    tokens = jnp.asarray(np.random.default_rng(0).integers(6, 200, (2, 24)), jnp.int32)
    anchors = jnp.asarray([[3, 9], [12, 17]], jnp.int32)
    logits = []
    for made, weights in ((of_dflash, begun), (model_def, params)):

        @jax.jit
        def predict(weights: Any, made: Any = made) -> passes.Predictions:
            bound, model = made.bind(weights), target().model_def.bind(target().params)
            reading = passes.read(model, bound, tokens, jnp.full(2, 24), SUPPRESSED)
            return passes.predictor(bound, reading)(anchors)

        scores = predict(weights)
        logits.append((scores.base or scores.final).logits)
    np.testing.assert_allclose(logits[1], logits[0], rtol=1e-4, atol=1e-4)


def test_other_starts_are_refused() -> None:
    with pytest.raises(ConfigError, match="of kind mtp cannot start from one of kind dflash"):
        new.config_from("mtp", tiny_pair.DRAFTER)
    with pytest.raises(ConfigError, match="kind is eagle; expected one of dflash, dflash2"):
        new.new_config("eagle", tiny_pair.TARGET)
    causal = dataclasses.replace(tiny_pair.DRAFTER, own_embedding=True)
    with pytest.raises(Exception, match="cannot hold own_embedding"):
        new.write_hf(Path("nowhere"), causal, {}, "float32")
    assert json.dumps(new.hf_config(tiny_pair.DRAFTER)[0])
