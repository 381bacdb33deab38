"""MTP assistants against transformers, step by step, and what the drafter makes of the steps.

The target's keys and values come from its own caches, which were filled in uneven pieces and hold rings;
transformers is handed those of one pass without caches. Each step starts from the oracle's own token and
state: chains of random weights drift apart by themselves.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxspec import cache as kv
from jaxspec.configs.base import ConfigError, LayerType
from jaxspec.configs.gemma4 import PRESETS as TARGET_PRESETS
from jaxspec.configs.mtp import PRESETS as MTP_PRESETS
from jaxspec.configs.mtp import MTPConfig
from jaxspec.drafters.base import Kept, TargetView, Tree
from jaxspec.drafters.mtp import FrozenKV, MTPDrafter, ranked_indices
from jaxspec.models.gemma4 import Gemma4
from jaxspec.models.target import Caches, TargetOutput, init_caches
from jaxspec.shapes import Array, Params
from jaxspec.weights import loading
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.model_def import ModelDef
from tests import tiny
from tests.cases import SOME_FEATURE_SETS

LENGTHS = (5, 23, 61)  # the window is 8: below it, past it, and past its ring
PIECES = (3, 7, 1, 4)
STEPS = 5
# Norm-wise. As for targets: rounding gives 1e-6, a wrong convention 1e-3 and more.
TOLERANCE = 1e-4


@functools.partial(jax.jit, static_argnums=0)
def feed(
    model_def: ModelDef, params: Params, tokens: Any, start: Any, count: Any, caches: Caches
) -> Any:
    return model_def.bind(params)(tokens, start, count, caches)


@functools.partial(jax.jit, static_argnums=0)
def whole(model_def: ModelDef, params: Params, tokens: Array) -> TargetOutput:
    """Run the target over padded prompts without caches; the mask of a chain makes it return its K/V."""
    b, n = tokens.shape
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((n, n), bool)), (b, n, n))
    return model_def.bind(params)(
        tokens, jnp.zeros(b, jnp.int32), jnp.full(b, n), None, ancestors=causal
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def step(
    model_def: ModelDef,
    target_def: ModelDef,
    params: Params,
    target_params: Params,
    caches: Caches,
    lengths: Array,
    tokens: Array,
    states: Array,
) -> tuple[Array, Array]:
    """Return the logits over the whole vocabulary (-inf where not looked at) and the next states."""
    target, drafter = target_def.bind(target_params), model_def.bind(params)
    view = TargetView(target, caches)
    segments: dict[LayerType, kv.KVSegment] = {
        kind: kv.view(view.last_kv(kind), lengths) for kind in ("sliding", "full")
    }
    hidden, states = drafter.step(
        target, tokens[:, None], states[:, None], FrozenKV(segments, lengths[:, None] - 1)
    )
    logits, ids = drafter.choices(hidden)
    if ids is not None:
        rows = jnp.arange(tokens.shape[0])[:, None]
        everything = jnp.full((tokens.shape[0], drafter.config.vocab_size), -jnp.inf)
        return everything.at[rows, ids[:, 0]].set(logits[:, 0]), states[:, 0]
    return logits[:, 0], states[:, 0]


@dataclass(frozen=True)
class Pair:
    """A target and its assistant, prompts that the target has read, and the oracle."""

    oracle: Any
    target: LoadedModel
    assistant: LoadedModel
    prompts: tuple[np.ndarray, ...]
    caches: Caches
    whole: TargetOutput  # of the padded prompts, without caches

    @property
    def states(self) -> np.ndarray:
        """What the target makes of each prompt's last token."""
        return np.asarray(self.whole.hidden)[np.arange(len(LENGTHS)), np.asarray(LENGTHS) - 1]

    def oracle_step(
        self, row: int, token: int, state: np.ndarray, config: MTPConfig
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return transformers' logits and next state.

        It sees the last w + 1 of the keys it is handed, whatever the position; so it is handed no more than
        the convention has.
        """
        torch = pytest.importorskip("torch")
        target, n = self.target, len(self.prompts[row])
        bound = target.model_def.bind(target.params)
        embedding = np.asarray(bound.embed(jnp.asarray([[token]])))[0, 0]
        shared = {}
        for kind in ("sliding", "full"):
            segment = self.whole.fresh[target.config.last_kv_owner(kind)]
            assert segment is not None
            begin = max(n - config.num_window_keys, 0) if kind == "sliding" else 0
            shared[f"{kind}_attention"] = tuple(
                torch.from_numpy(np.asarray(x)[row : row + 1, :, begin:n].copy())
                for x in (segment.k, segment.v)
            )
        inputs = torch.from_numpy(np.concatenate([embedding, state]))[None, None]
        position = n if config.query_position == "next" else n - 1
        with torch.no_grad():
            out = self.oracle(
                inputs_embeds=inputs,
                position_ids=torch.tensor([[position]]),
                shared_kv_states=shared,
            )
        return out.logits[0, 0].numpy(), out.last_hidden_state[0, 0].numpy()


@pytest.fixture(scope="module", params=SOME_FEATURE_SETS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    pytest.importorskip("torch", reason="parity is measured against transformers")
    directory = tmp_path_factory.mktemp("pair")
    tiny.save(request.param, directory / "target")
    oracle = tiny.save_assistant(request.param, directory / "assistant")
    target = loading.load_target(str(directory / "target"), dtype="float32")
    rng = np.random.default_rng(0)
    prompts = tuple(rng.integers(20, tiny.VOCAB_SIZE, n).astype(np.int32) for n in LENGTHS)
    caches = init_caches(
        target.config, len(prompts), cache_length=80, slack=max(PIECES), dtype=jnp.float32
    )
    lengths, start, i = np.asarray(LENGTHS), np.zeros(len(LENGTHS), np.int32), 0
    while (start < lengths).any():
        count = np.minimum(PIECES[i % len(PIECES)], lengths - start).astype(np.int32)
        tokens = np.zeros((len(prompts), max(PIECES)), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : count[row]] = prompt[start[row] : start[row] + count[row]]
        caches = feed(target.model_def, target.params, tokens, start, count, caches).caches
        start, i = start + count, i + 1
    padded = np.zeros((len(prompts), max(LENGTHS)), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    return Pair(
        oracle,
        target,
        loading.load_drafter(str(directory / "assistant"), dtype="float32"),
        prompts,
        caches,
        whole(target.model_def, target.params, jnp.asarray(padded)),
    )


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("position", ["last", "next"])
@pytest.mark.parametrize("extra_key", [0, 1])
def test_steps_equal_transformers(pair: Pair, position: Any, extra_key: int) -> None:
    """Transformers' own generation has position "next" and the extra key; the default is neither."""
    window = pair.target.config.sliding_window + extra_key
    config = dataclasses.replace(
        pair.assistant.config, query_position=position, num_window_keys=window
    )
    model_def = ModelDef(MTPDrafter, config, "float32")
    tokens = np.asarray([7, 90, 33], np.int32)
    states = pair.states
    worst = 0.0
    for _ in range(STEPS):
        logits, new_states = jax.device_get(
            step(
                model_def,
                pair.target.model_def,
                pair.assistant.params,
                pair.target.params,
                pair.caches,
                np.asarray(LENGTHS),
                tokens,
                states,
            )
        )
        for row in range(len(LENGTHS)):
            want, want_state = pair.oracle_step(row, int(tokens[row]), states[row], config)
            seen = np.isfinite(logits[row])
            # transformers fills what no chosen centroid has with less than the least.
            assert (want[~seen] == want.min()).all()
            assert seen.all() or (want[seen].min() > want.min())
            errors = (
                relative_error(logits[row][seen], want[seen]),
                relative_error(new_states[row], want_state),
            )
            worst = max(worst, *errors)
            assert logits[row].argmax() == want.argmax()
            tokens[row], states[row] = want.argmax(), want_state
    print(f"largest relative error {worst:.1e}")
    assert worst < TOLERANCE


def test_a_different_convention_would_be_seen(pair: Pair) -> None:
    """The negative control: position and the extra key both move the logits past the tolerance."""
    config, row = pair.assistant.config, 2
    state = pair.states[row]
    base, _ = pair.oracle_step(row, 33, state, config)
    for change in (
        dict(query_position="next"),
        dict(num_window_keys=config.sliding_window + 1),
    ):
        other, _ = pair.oracle_step(row, 33, state, dataclasses.replace(config, **change))
        assert relative_error(other, base) > 10 * TOLERANCE


def test_drafts_are_the_best_of_each_step(pair: Pair) -> None:
    """`draft` chains steps from its own tokens and states; a tree of one branch is that chain."""
    assistant, target = pair.assistant, pair.target
    suppressed = (3, 50)

    @functools.partial(jax.jit, static_argnums=3)
    def draft(params: Params, target_params: Params, states: Array, tree: Tree | None) -> Any:
        model = target.model_def.bind(target_params)
        view = TargetView(model, pair.caches, suppressed)
        return assistant.model_def.bind(params).draft(
            states,
            view,
            jnp.asarray([7, 90, 33]),
            jnp.asarray(LENGTHS),
            num_draft_tokens=STEPS,
            tree=tree,
        )

    states = jnp.asarray(pair.states)
    got = draft(assistant.params, target.params, states, None)
    assert got.parents is None
    tokens = jnp.asarray([7, 90, 33])
    for i in range(STEPS):
        logits, states = step(
            assistant.model_def,
            target.model_def,
            assistant.params,
            target.params,
            pair.caches,
            jnp.asarray(LENGTHS),
            tokens,
            states,
        )
        tokens = jnp.argmax(logits.at[:, jnp.asarray(suppressed)].set(-jnp.inf), axis=-1)
        np.testing.assert_array_equal(got.tokens[:, i], tokens)
    tree = draft(assistant.params, target.params, jnp.asarray(pair.states), Tree(1, STEPS))
    np.testing.assert_array_equal(tree.tokens, got.tokens)
    np.testing.assert_array_equal(tree.parents, np.broadcast_to(np.arange(STEPS), (3, STEPS)))


def test_ranks_are_those_of_sorting() -> None:
    """Of equals the first, as everywhere: half of these scores have some."""
    scores = jnp.round(4 * jax.random.normal(jax.random.key(0), (2, 3, 40)))
    np.testing.assert_array_equal(ranked_indices(scores, 11), lax.top_k(scores, 11)[1])


@pytest.mark.parametrize("size", ["e2b", "e4b"])
def test_centroids_keep_the_vocabulary_out_of_a_chain(size: str) -> None:
    """At the released sizes no step makes an array of 262144 of anything; a dense head does."""
    target_config, batch = TARGET_PRESETS[size], 2

    def largest(config: MTPConfig) -> int:
        model_def, target = (
            ModelDef(MTPDrafter, config, "bfloat16"),
            ModelDef(Gemma4, target_config, "bfloat16"),
        )
        caches = jax.eval_shape(
            lambda: init_caches(
                target_config, batch, cache_length=1024, slack=8, dtype=jnp.bfloat16
            )
        )

        def draft(params: Params, target_params: Params, caches: Caches, states: Array) -> Array:
            view = TargetView(target.bind(target_params), caches, (3,))
            ids = jnp.zeros(batch, jnp.int32)
            return (
                model_def.bind(params).draft(states, view, ids, ids + 9, num_draft_tokens=2).tokens
            )

        states = jax.ShapeDtypeStruct((batch, target_config.hidden_size), jnp.bfloat16)
        shapes = model_def.abstract_params(), target.abstract_params(), caches, states
        return max(d for shape in made_by(jax.make_jaxpr(draft)(*shapes).jaxpr) for d in shape)

    config = MTP_PRESETS[size]
    assert largest(config) < 16_384
    assert largest(dataclasses.replace(config, num_centroids=0)) == config.vocab_size


def made_by(jaxpr: Any) -> Iterator[tuple[int, ...]]:
    """Yield the shape of everything a program computes, one dimension at least."""
    for equation in jaxpr.eqns:
        inner = [j for v in equation.params.values() if (j := getattr(v, "jaxpr", None))]
        for j in inner:
            yield from made_by(getattr(j, "jaxpr", j))
        if not inner:
            yield from ((*v.aval.shape, 1) for v in equation.outvars)


# --- config ----------------------------------------------------------------------------------------


def test_presets_fit_their_targets_and_no_other() -> None:
    for name, config in MTP_PRESETS.items():
        for other, target in TARGET_PRESETS.items():
            if name == other:
                config.check_fits(target)
            else:
                with pytest.raises(ConfigError, match=r"does not fit the target: .*own size"):
                    config.check_fits(target)


def test_presets_have_the_released_parameter_counts() -> None:
    """Millions, the token ordering not counted. Source: the model cards."""
    millions = {"e2b": 77.7, "e4b": 78.5, "12b": 422.9, "26b-a4b": 419.7, "31b": 469.5}
    for name, config in MTP_PRESETS.items():
        shapes = ModelDef(MTPDrafter, config, "bfloat16").abstract_params()
        count = sum(a.size for key, a in shapes.items() if key != "token_ordering")
        assert count / 1e6 == pytest.approx(millions[name], abs=0.06)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(model_type="gemma4_text"), "has model_type 'gemma4_text'; an assistant has one of"),
        (dict(text_config=None), "no text_config"),
        (dict(query_position="here"), "query_position is 'here'; it must be last .* or next"),
        (dict(num_window_keys=20), "num_window_keys is 20; expected the sliding_window of 8"),
        (dict(num_centroids=7), "7 centroids do not divide a vocabulary of 160"),
        (dict(centroid_intermediate_top_k=17), "num_top_centroids is 17; expected 1 to"),
        (dict(text=dict(enable_moe_block=True)), "enable_moe_block = True"),
        (dict(text=dict(final_logit_softcapping=30.0)), "final_logit_softcapping = 30; only"),
        (dict(text=dict(num_kv_shared_layers=2)), "num_kv_shared_layers = 2; all 4 layers"),
        (dict(backbone_hidden_size=None), "no backbone_hidden_size"),
    ],
)
def test_configs_that_are_no_assistant(changes: dict[str, Any], message: str) -> None:
    config = tiny.hf_assistant_config("e2b")
    config["text_config"] |= changes.pop("text", {})
    with pytest.raises(ConfigError, match=message):
        MTPConfig.from_hf(config | changes)


def test_generation_config_says_how_many_to_draft_and_what_never() -> None:
    config = tiny.hf_assistant_config("12b")
    generation = dict(num_assistant_tokens=3, suppress_tokens=[7, 11])
    read = MTPConfig.from_hf(config, generation)
    assert (read.num_draft_tokens, read.suppress_tokens) == (3, (7, 11))
    assert MTPConfig.from_hf(config).num_draft_tokens == 5
    # A file may ask for more than there is room for; only what a user asks for is refused.
    many = MTPConfig.from_hf(config, dict(num_assistant_tokens=20))
    assert ModelDef(MTPDrafter, many, "float32").bind_abstract().default_draft_tokens == 15


def test_the_last_of_several_rows_of_a_slot_is_kept() -> None:
    """Pieces of a prompt share a pass, and a device writes its rows in any order."""
    slots, start, count = (jnp.array(x) for x in ([2, 0, 2, 1], [4, 0, 0, 0], [2, 1, 4, 0]))
    nothing = jnp.zeros((4, 4), jnp.int32)
    kept = Kept(nothing, jnp.zeros((4, 1, 1)), (), start, count, slots)
    put = kept.put(jnp.full((3, 1), -1), jnp.arange(4)[:, None])
    assert put[:, 0].tolist() == [1, -1, 0]
