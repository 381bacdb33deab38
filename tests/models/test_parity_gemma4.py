"""Targets against transformers in float32: logits, hidden states, layer features, greedy tokens.

Each feature set is saved by transformers, loaded through our conversion, and run over the same prompts.
Prompts of 5, 60 and 130 tokens stand in one padded batch: below the window of 8, past it, and past the
ring of 64 slots that holds it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.configs.gemma4 import PRESETS as TARGET_PRESETS
from jaxspec.configs.gemma4 import Gemma4Config
from jaxspec.engine.engine import Completion, Engine, Request
from jaxspec.models.target import Caches, TargetOutput, init_caches
from jaxspec.shapes import Array, Params
from jaxspec.weights import loading
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.model_def import ModelDef
from tests import tiny
from tests.cases import slow

torch = pytest.importorskip(
    "torch", reason="parity is measured against transformers, which needs torch"
)
transformers = pytest.importorskip("transformers", reason="parity is measured against transformers")

LENGTHS = (5, 60, 130)
SLACK = 4  # rings of window 8 + slack 4 are rounded up to 64 slots, so their real slack is 56

# Norm-wise, over a prompt's positions. float32 sums of these widths differ by about 1e-7 an operation
# between two orders of adding, and grow to 1e-6 over the layers; a wrong convention (a norm's 1 + w, a
# rounded constant, a key too many) shows at 1e-3 and above.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Pair:
    """One feature set in both worlds, with the oracle's answers."""

    oracle: Any
    model: LoadedModel
    prompts: tuple[np.ndarray, ...]
    logits: tuple[np.ndarray, ...]  # a prompt
    hidden_states: tuple[list[np.ndarray], ...]  # a prompt, a layer


@pytest.fixture(scope="module", params=tiny.FEATURE_SETS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    directory = tmp_path_factory.mktemp("checkpoint")
    oracle = tiny.save(request.param, directory)
    model = loading.load_target(str(directory), dtype="float32")
    rng = np.random.default_rng(0)
    prompts = tuple(rng.integers(2, tiny.VOCAB_SIZE, n).astype(np.int32) for n in LENGTHS)
    with torch.no_grad():
        answers = [
            oracle(torch.from_numpy(p).long()[None], output_hidden_states=True) for p in prompts
        ]
    return Pair(
        oracle,
        model,
        prompts,
        tuple(a.logits[0].numpy() for a in answers),
        tuple([h[0].numpy() for h in a.hidden_states] for a in answers),
    )


@functools.partial(jax.jit, static_argnums=0, donate_argnums=5)
def forward(
    model_def: ModelDef, params: Params, tokens: Array, start: Array, count: Array, caches: Caches
) -> TargetOutput:
    every_layer = tuple(range(model_def.config.num_layers))
    return model_def.bind(params)(tokens, start, count, caches, feature_layers=every_layer)


def forward_in_chunks(
    model: LoadedModel, prompts: tuple[np.ndarray, ...], chunks: Iterator[np.ndarray], width: int
) -> list[TargetOutput]:
    """Feed prompts as one padded batch, `width` tokens a pass, each row as many as `chunks` says.

    Returns:
      A prompt's outputs at all its positions, as numpy arrays without a batch axis.
    """
    config, b = model.config, len(prompts)
    caches = init_caches(config, b, cache_length=192, slack=SLACK, dtype=jnp.float32)
    lengths = np.array([len(p) for p in prompts])
    start, parts = np.zeros(b, np.int32), [[] for _ in prompts]
    while (start < lengths).any():
        count = np.minimum(next(chunks), lengths - start).astype(np.int32)
        tokens = np.full((b, width), 3, np.int32)  # padding is not 0, which might be special
        for row, prompt in enumerate(prompts):
            tokens[row, : count[row]] = prompt[start[row] : start[row] + count[row]]
        out = forward(model.model_def, model.params, tokens, start, count, caches)
        caches = out.caches
        out = jax.device_get(out.replace(caches=None))
        for row, n in enumerate(count):
            parts[row].append(jax.tree.map(lambda x, row=row, n=n: x[row, :n], out))
        start = start + count
    return [jax.tree.map(lambda *x: np.concatenate(x), *rows) for rows in parts]


def even(width: int) -> Iterator[np.ndarray]:
    while True:
        yield np.full(len(LENGTHS), width)


def uneven(width: int) -> Iterator[np.ndarray]:
    """Give every row its own number of tokens each pass, none at all now and then."""
    rng = np.random.default_rng(width)
    while True:
        yield rng.integers(0, width + 1, len(LENGTHS))


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


@pytest.mark.parametrize(
    ("chunks", "width"),
    [(even, 1), (uneven, 24), (even, 80)],
    ids=["one-at-a-time", "uneven", "longer-than-ring-slack"],
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
    assert {k: e for k, e in errors.items() if not e < TOLERANCE} == {}


@pytest.mark.parametrize(
    ("gone", "change"),
    [
        ((), {"factor": 4.0}),  # it was ignored
        (("rope_type",), {}),  # it was read as "proportional": transformers turns whole heads
        (("rope_type",), {"type": "proportional", "factor": 2.5}),
        (("partial_rotary_factor",), {}),  # it was read as 0.25: transformers turns whole heads
    ],
)
def test_rotary_embeddings_equal_transformers(
    gone: tuple[str, ...], change: dict[str, Any], tmp_path: Path
) -> None:
    tiny.save("31b", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config["rope_parameters"]["full_attention"]
    for key in gone:
        del rope[key]
    (tmp_path / "config.json").write_text(
        json.dumps(
            config
            | {"rope_parameters": {**config["rope_parameters"], "full_attention": rope | change}}
        )
    )
    oracle = transformers.Gemma4ForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    model = loading.load_target(str(tmp_path), dtype="float32")
    rng = np.random.default_rng(0)
    prompts = tuple(rng.integers(2, tiny.VOCAB_SIZE, n).astype(np.int32) for n in LENGTHS)
    outputs = forward_in_chunks(model, prompts, even(80), 80)
    for prompt, out in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            logits = oracle(torch.from_numpy(prompt).long()[None]).logits[0].numpy()
        assert relative_error(out.logits, logits) < TOLERANCE


@pytest.mark.parametrize("pair", ["26b-a4b", *slow("e2b", "e4b", "12b", "31b")], indirect=True)
def test_64_greedy_tokens_equal_transformers(pair: Pair) -> None:
    """Suppressed tokens are in play on 12b, where they would win.

    One prompt goes through `generate` of transformers, a pass for each token. Of the others one pass tells all: each of
    our tokens has to be its likeliest where it stands.
    """
    engine = Engine(pair.model, None, batch_size=4, cache_length=256, steps_per_return=64)
    requests = [Request(tuple(map(int, p)), 64) for p in pair.prompts]
    completions = {c.id: c for c in engine.run(requests) if isinstance(c, Completion)}
    suppressed = pair.oracle.generation_config.suppress_tokens or ()
    for index, prompt in enumerate(pair.prompts):
        assert completions[index].error is None
        ours, ids = completions[index].token_ids, torch.from_numpy(prompt).long()[None]
        if index == 0:
            theirs = pair.oracle.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=64,
                eos_token_id=None,
            )[0, len(prompt) :]
        else:
            with torch.no_grad():
                whole = torch.cat([ids, torch.tensor([ours])], dim=1)
                logits = pair.oracle(whole).logits[0, len(prompt) - 1 : -1]
            logits[:, list(suppressed)] = -torch.inf
            theirs = logits.argmax(dim=1)
        assert ours == tuple(theirs.tolist())
        assert len(set(ours)) > 8, "a model that repeats itself shows little"
    assert not set(suppressed) & {t for c in completions.values() for t in c.token_ids}


def test_both_shapes_of_config_give_the_same_model(pair: Pair) -> None:
    """What transformers wrote has `per_layer_config`; the releases name their full layers' values."""
    written = json.loads((pair.model.directory / "config.json").read_text())
    assert "per_layer_config" in written
    assert "global_head_dim" not in written
    name = next(n for n in tiny.FEATURE_SETS if tiny.config(n) == pair.model.config)
    assert Gemma4Config.from_hf(written) == Gemma4Config.from_hf(tiny.hf_config(name))


@pytest.mark.parametrize("name", TARGET_PRESETS)
def test_presets_survive_transformers_config(name: str, tmp_path: Any) -> None:
    """A preset as a released config.json, read and written by transformers, is the preset again.

    The released sizes have more than ten layers, whose indices transformers pads with zeros.
    """
    preset = TARGET_PRESETS[name]
    unified = name == "12b"
    cls = transformers.Gemma4UnifiedTextConfig if unified else transformers.Gemma4TextConfig
    cls(**as_released(preset)).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "0" + str(preset.layer_types.index("full")) in written["per_layer_config"]
    assert Gemma4Config.from_hf(written) == preset


def as_released(config: Gemma4Config) -> dict[str, Any]:
    """Return a config in the names and shape of the releases."""
    values = dict(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        layer_types=[f"{kind}_attention" for kind in config.layer_types],
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        num_global_key_value_heads=config.full_num_kv_heads if config.k_eq_v else None,
        head_dim=config.head_dim,
        global_head_dim=config.full_head_dim,
        attention_k_eq_v=config.k_eq_v,
        intermediate_size=config.intermediate_size,
        use_double_wide_mlp=config.double_wide_mlp,
        sliding_window=config.sliding_window,
        max_position_embeddings=config.max_positions,
        num_kv_shared_layers=config.num_kv_shared_layers,
        hidden_size_per_layer_input=config.per_layer_input_size,
        vocab_size_per_layer_input=config.per_layer_vocab_size,
        final_logit_softcapping=config.final_logit_softcap,
    )
    if config.num_experts:
        values |= dict(
            enable_moe_block=True,
            num_experts=config.num_experts,
            top_k_experts=config.num_experts_per_token,
            moe_intermediate_size=config.expert_intermediate_size,
        )
    return values


# --- values that hardly reach the logits, so that a wrong one would pass above ------------------------


def inputs(pair: Pair, seed: int = 1) -> tuple[Array, Any]:
    x = np.random.default_rng(seed).normal(size=(2, 7, pair.model.config.hidden_size))
    return jnp.asarray(x, jnp.float32), torch.from_numpy(x.astype(np.float32))


def test_per_layer_inputs_equal_transformers(pair: Pair) -> None:
    """Each layer norms what its per-layer input adds, which hides the input's scale of 2^-0.5."""
    if not pair.model.config.per_layer_input_size:
        pytest.skip("this size has no per-layer inputs")
    ours = pair.model.model_def.bind(pair.model.params)
    tokens = np.random.default_rng(1).integers(0, tiny.VOCAB_SIZE, (2, 7)).astype(np.int32)
    got = ours.per_layer(jnp.asarray(tokens), ours.embedder.embed(jnp.asarray(tokens)))
    text = pair.oracle.model
    ids = torch.from_numpy(tokens).long()
    with torch.no_grad():
        expected = text.project_per_layer_inputs(
            text.embed_tokens(ids), text.get_per_layer_inputs(ids)
        )
    assert relative_error(np.asarray(got), expected.numpy()) < TOLERANCE


def test_routing_equals_transformers(pair: Pair) -> None:
    """The experts' output is normed, which hides the scale of the routing weights."""
    if not pair.model.config.num_experts:
        pytest.skip("this size has no experts")
    x, x_torch = inputs(pair)
    bound = pair.model.model_def.bind(pair.model.params)
    for ours, theirs in zip(bound.layers, pair.oracle.model.layers, strict=True):
        chosen, weights = jax.device_get(ours.experts.route(x))
        with torch.no_grad():
            _, their_weights, their_chosen = theirs.router(x_torch.reshape(-1, x.shape[-1]))
        np.testing.assert_array_equal(chosen.reshape(-1, chosen.shape[-1]), their_chosen.numpy())
        got = weights.reshape(-1, weights.shape[-1])
        assert relative_error(got, their_weights.numpy()) < TOLERANCE
        assert np.ptp(got.sum(-1)) > 0.1, "expert scales are not 1, so the weights do not sum to 1"
