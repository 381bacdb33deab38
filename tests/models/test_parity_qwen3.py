"""Qwen3 against transformers in float32: logits, hidden states, layer features, greedy tokens.

As in `test_parity_gemma4`: prompts of 5, 60 and 130 tokens stand in one padded batch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.configs.qwen3 import PRESETS, Qwen3Config
from jaxspec.weights.loading import LoadedModel, load_target
from tests import tiny_qwen3
from tests.fakes import forward, naive_greedy
from tests.models.test_parity_gemma4 import (
    LENGTHS,
    TOLERANCE,
    even,
    forward_in_chunks,
    relative_error,
    uneven,
)
from tests.tiny import VOCAB_SIZE

torch = pytest.importorskip(
    "torch", reason="parity is measured against transformers, which needs torch"
)
transformers = pytest.importorskip("transformers", reason="parity is measured against transformers")


@dataclass(frozen=True)
class Pair:
    """One feature set in both worlds, with the oracle's answers."""

    name: str
    oracle: Any
    model: LoadedModel
    prompts: tuple[np.ndarray, ...]
    logits: tuple[np.ndarray, ...]  # a prompt
    hidden_states: tuple[list[np.ndarray], ...]  # a prompt, a layer


@pytest.fixture(scope="module", params=tiny_qwen3.FEATURE_SETS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    directory = tmp_path_factory.mktemp("checkpoint")
    oracle = tiny_qwen3.save(request.param, directory)
    model = load_target(str(directory), dtype="float32")
    rng = np.random.default_rng(0)
    prompts = tuple(rng.integers(2, VOCAB_SIZE, n).astype(np.int32) for n in LENGTHS)
    with torch.no_grad():
        answers = [
            oracle(torch.from_numpy(p).long()[None], output_hidden_states=True) for p in prompts
        ]
    return Pair(
        request.param,
        oracle,
        model,
        prompts,
        tuple(a.logits[0].numpy() for a in answers),
        tuple([h[0].numpy() for h in a.hidden_states] for a in answers),
    )


def test_the_feature_sets_are_what_they_are_meant_to_be(pair: Pair) -> None:
    """Else what follows shows less than it says."""
    c = pair.model.config
    assert c.tied_head == (pair.name == "qwen3-tied")
    assert ("head_table" in pair.model.params) == (not c.tied_head)
    wide = c.num_heads * c.head_dim != c.hidden_size
    assert wide == (pair.name == "qwen3-tied")
    assert c.num_kv_heads > 1
    assert c.num_heads > c.num_kv_heads
    norms = [x for x in pair.model.params.values() if x.ndim == 1]
    assert len(norms) == 4 * c.num_layers + 1
    assert all(jnp.ptp(x) > 0.5 for x in norms)


@pytest.mark.parametrize(
    ("chunks", "width"), [(even, 1), (uneven, 24), (even, 80)], ids=["steps", "uneven", "long"]
)
def test_logits_and_features_equal_transformers(pair: Pair, chunks: Any, width: int) -> None:
    outputs = forward_in_chunks(pair.model, pair.prompts, chunks(width), width)
    errors = {}
    for n, out, logits, hidden in zip(
        LENGTHS, outputs, pair.logits, pair.hidden_states, strict=True
    ):
        errors[n, "logits"] = relative_error(out.logits, logits)
        # The last entry is post-norm: the last layer's own output is not among the oracle's states.
        errors[n, "hidden"] = relative_error(out.hidden, hidden[-1])
        for i, feature in enumerate(out.features[:-1]):
            errors[n, f"layer {i}"] = relative_error(feature, hidden[i + 1])
    print("largest relative error", max(errors.values()))
    assert len(errors) == 3 * (2 + pair.model.config.num_layers - 1)
    assert {k: e for k, e in errors.items() if not e < TOLERANCE} == {}


def test_a_pass_without_caches_equals_transformers(pair: Pair) -> None:
    logits = forward(pair.model.model_def, pair.model.params, jnp.asarray(pair.prompts[1])[None])
    assert relative_error(np.asarray(logits[0]), pair.logits[1]) < TOLERANCE


def test_greedy_tokens_equal_transformers(pair: Pair) -> None:
    prompts = [p[:20].tolist() for p in pair.prompts]
    ours = naive_greedy(pair.model, prompts, 24)
    assert ours.smallest_gap > 1e-4
    said: set[int] = set()
    for prompt, sequence in zip(prompts, ours.sequences, strict=True):
        ids = torch.tensor([prompt])
        theirs = pair.oracle.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=24,
            eos_token_id=None,
        )
        assert sequence == theirs[0].tolist()
        said |= set(sequence[len(prompt) :])
    assert len(said) > 20, "models that repeat themselves show little"


def test_both_shapes_of_config_give_the_same_model(pair: Pair) -> None:
    """What transformers 5 wrote has `rope_parameters`; the releases have `rope_theta`."""
    written = json.loads((pair.model.directory / "config.json").read_text())
    assert "rope_parameters" in written
    assert "rope_theta" not in written
    assert Qwen3Config.from_hf(written) == tiny_qwen3.config(pair.name)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_transformers_config(name: str, tmp_path: Path) -> None:
    """A preset as a released config.json, read and written by transformers, is the preset again."""
    c = PRESETS[name]
    values = dict(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        intermediate_size=c.intermediate_size,
        max_position_embeddings=c.max_positions,
        tie_word_embeddings=c.tied_head,
        rope_theta=1_000_000,
        rms_norm_eps=1e-6,
    )
    transformers.Qwen3Config(**values).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert Qwen3Config.from_hf(written) == c
