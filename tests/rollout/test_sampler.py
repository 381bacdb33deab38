"""The sampler: one result however it is called, rows that depend on nothing but themselves, errors that say why."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Completion, Request
from jaxspec.models.gemma4 import Gemma4
from jaxspec.options import Drafting, FieldError, ProgramFeatures, Sampling
from jaxspec.rollout import programs
from jaxspec.rollout.batch import FinishReason, GenerateResult, Prompts, check_ids
from jaxspec.rollout.sampler import Sampler
from jaxspec.runtime import prefill
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.model_def import ModelDef
from tests import fakes, tiny

NEW_TOKENS = 12
EXTRAS = ProgramFeatures(logprobs=True, penalties=True)
PROMPTS = [[2, 17, 80, 33, 5, 9, 41], [2, 99], [2, 40, 40, 7], [2, 7, 8, 9, 10, 11, 12, 13, 14]]
TEMPERATURES = [0.0, 1.0, 0.7, 1.3]


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    """A sliding layer and a full one: the fewest that have every kind of cache."""
    config = dataclasses.replace(tiny.config("31b"), layer_types=("sliding", "full"))
    model_def = ModelDef(Gemma4, config, "float32")
    return fakes.loaded(model_def, tiny.random_params(model_def, 0))


@pytest.fixture(scope="module")
def drafter(target: LoadedModel) -> LoadedModel:
    return fakes.dflash(target, block_size=4)


@pytest.fixture(scope="module")
def sampler(target: LoadedModel, drafter: LoadedModel) -> Sampler:
    return Sampler(target, drafter, max_new_tokens=NEW_TOKENS, program_features=EXTRAS)


@pytest.fixture(scope="module")
def ask(sampler: Sampler, target: LoadedModel, drafter: LoadedModel) -> Any:
    """Call the sampler, with something of its usual arguments changed."""

    def call(prompts: Any = PROMPTS, **changes: Any) -> GenerateResult:
        rows = len(prompts.tokens) if isinstance(prompts, Prompts) else len(prompts)
        given: dict[str, Any] = dict(
            target_params=target.params,
            drafter_params=drafter.params,
            prompts=prompts,
            sampling=sampling(sampler),
            seeds=np.arange(rows) + 5,
        )
        return sampler(**(given | changes))

    return call


def sampling(sampler: Sampler, order: Any = slice(None)) -> Any:
    return sampler.sampling(
        4,
        temperature=np.asarray(TEMPERATURES)[order],
        top_k=np.asarray([0, 0, 20, 0])[order],
        repetition_penalty=np.asarray([1.0, 1.0, 1.2, 1.0])[order],
        frequency_penalty=np.asarray([0.5, 0.0, 0.2, 0.0])[order],
    )


def same(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_greedy_rows_are_those_of_naive_decoding(
    target: LoadedModel, sampler: Sampler, ask: Any
) -> None:
    result = ask(sampling=sampler.sampling(4))
    naive = fakes.naive_greedy(target, PROMPTS, NEW_TOKENS)
    for row, prompt in enumerate(PROMPTS):
        assert result.tokens[row].tolist() == naive.sequences[row][len(prompt) :]
    lengths = [n for row in result.acceptance_lengths.tolist() for n in row if n]
    assert float(result.acceptance_length()) == pytest.approx(np.mean(lengths))
    expected = [np.mean([n > depth for n in lengths]) for depth in (1, 2, 3)]
    np.testing.assert_allclose(result.accepted_per_depth(), expected, rtol=1e-6)


def test_inside_jit_and_streamed_it_is_the_same(
    sampler: Sampler, target: LoadedModel, drafter: LoadedModel, ask: Any
) -> None:
    expected = ask()
    given = (Prompts.padded(PROMPTS), sampling(sampler), jnp.arange(4) + 5)
    jitted = jax.jit(lambda target, drafter: sampler(target, drafter, *given))
    same(jitted(target.params, drafter.params), expected)
    parts = list(sampler.stream(target.params, drafter.params, *given, steps_per_return=2))
    assert len(parts) > 2
    assert (parts[0].finish_reasons == FinishReason.UNFINISHED).any()
    for before, after in itertools.pairwise(parts):
        grown = np.arange(NEW_TOKENS) < before.lengths[:, None]
        same(before.tokens, jnp.where(grown, after.tokens, 0))
    same(parts[-1], expected)


def test_a_row_depends_on_nothing_but_itself(sampler: Sampler, ask: Any) -> None:
    """Other neighbours in another order, and other padding: the same numbers, bit for bit."""
    expected, order = ask(), [2, 0, 3, 1]
    moved = ask(
        [PROMPTS[i] for i in order], sampling=sampling(sampler, order), seeds=np.asarray(order) + 5
    )
    same(moved, jax.tree.map(lambda x: x[jnp.asarray(order)], expected))
    prompts = Prompts.padded(PROMPTS)
    beyond = np.arange(prompts.tokens.shape[1]) >= prompts.lengths[:, None]
    padded = Prompts(jnp.where(beyond, 77, prompts.tokens), prompts.lengths)
    same(ask(padded), expected)
    alone = ask([PROMPTS[1], *[[2]] * 3], seeds=[6, 0, 0, 0])
    assert alone.tokens[1].tolist() != expected.tokens[1].tolist()  # row 1 is another one here
    swapped = sampling(sampler, [1, 0, 2, 3])
    alone = ask([PROMPTS[1], *[[2]] * 3], seeds=[6, 0, 0, 0], sampling=swapped)
    same(alone.tokens[0], expected.tokens[1])
    same(alone.logprobs.target[0], expected.logprobs.target[1])


@pytest.mark.slow  # a program for each number of rows
def test_a_row_is_the_same_in_a_batch_of_any_size(
    sampler: Sampler, target: LoadedModel, drafter: LoadedModel
) -> None:
    for rows in (1, 2, 5, 33):
        values = sampler.sampling(rows, temperature=np.where(np.arange(rows) % 2, 1.0, 0.0))
        prompts = [PROMPTS[i % 4] for i in range(rows)]
        result = sampler(target.params, drafter.params, prompts, values, np.arange(rows))
        if rows == 1:
            first = result.tokens[0]
        same(result.tokens[0], first)


def test_samples_of_one_prefill_are_those_of_many(
    target: LoadedModel, drafter: LoadedModel, sampler: Sampler, ask: Any
) -> None:
    forked = Sampler(
        target, drafter, max_new_tokens=NEW_TOKENS, num_samples=2, program_features=EXTRAS
    )
    values = sampler.sampling(4, temperature=1.0, repetition_penalty=1.1, presence_penalty=0.3)
    prompts, seeds = PROMPTS[2:], np.arange(4)
    result = forked(target.params, drafter.params, prompts, values, seeds)
    many = [p for p in prompts for _ in range(2)]
    expected = ask(many, sampling=values, seeds=seeds)
    same(result.tokens, expected.tokens)
    same(result.lengths, expected.lengths)
    assert result.logprobs is not None
    assert expected.logprobs is not None
    np.testing.assert_allclose(result.logprobs.target, expected.logprobs.target, atol=1e-4)
    assert len({tuple(row) for row in result.tokens.tolist()}) == 4


@pytest.mark.slow  # decode/test_lossless reads them in chunks by default
def test_long_prompts_are_read_in_chunks(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows end in different chunks, and one has nothing but its last token."""
    prompts = [[2, *range(5, 33)], [2], [2, *range(40, 53)]]
    whole = Sampler(target, None, max_new_tokens=4)
    given = (target.params, None, prompts, whole.sampling(3), range(3))
    expected = whole(*given)
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", 8)
    programs.programs_of.cache_clear()  # or the other sampler would share the program
    same(Sampler(target, None, max_new_tokens=4)(*given), expected)
    programs.programs_of.cache_clear()


def test_new_weights_compile_nothing_and_take_no_memory(
    sampler: Sampler, target: LoadedModel, drafter: LoadedModel, ask: Any
) -> None:
    ask()
    programs, drafts = sampler.num_compilations, jax.tree.map(np.asarray, drafter.params)
    seen, live = set(), []
    for i in range(20):
        name = "layers.0.post_mlp_norm"
        changed = target.params | {name: target.params[name] * (1 + i)}
        result = ask(target_params=changed)
        seen.add(tuple(result.tokens.reshape(-1).tolist()))
        del result, changed
        live.append(sum(x.nbytes for x in jax.live_arrays()))
    assert sampler.num_compilations == programs
    assert len(seen) > 10
    assert max(live[2:]) <= live[1]
    same(drafter.params, drafts)


def test_an_update_between_calls_compiles_once(
    sampler: Sampler, target: LoadedModel, ask: Any
) -> None:
    """Loaded weights and a new optimizer's count are uncommitted, and what is computed from results is too.

    Results were once committed to their device: then so were the updated weights, and both programs compiled
    again for them.
    """

    @jax.jit
    def update(params: Any, count: Any, result: GenerateResult) -> Any:
        step = 1 + 1e-6 * jnp.mean(result.logprobs.sampled) / (1 + count)
        return {name: weight * step for name, weight in params.items()}, count + 1

    params, count = target.params, jnp.zeros(())
    ask()
    programs = sampler.num_compilations
    for _ in range(3):
        params, count = update(params, count, ask(target_params=params))
    assert update._cache_size() == 1
    assert sampler.num_compilations == programs


def test_a_few_programs_serve_all_calls(
    sampler: Sampler, target: LoadedModel, drafter: LoadedModel, ask: Any
) -> None:
    """Other numbers of prompts, other kinds of seeds, committed weights and an identical sampler compile nothing.

    Each of these compiled a program of its own. Results have the rows that were asked for, and no padding.
    """
    expected = ask(seeds=7)
    programs = sampler.num_compilations
    fewer = ask(PROMPTS[:3], sampling=Sampling(repetition_penalty=1.2), seeds=7)
    assert fewer.tokens.shape == (3, NEW_TOKENS)
    again = ask(sampling=Sampling(repetition_penalty=1.2), seeds=7)
    same(fewer, jax.tree.map(lambda x: x[:3], again))
    same(ask(seeds=jax.random.key(7)), expected)
    each = ask(seeds=range(4))
    same(ask(seeds=jax.vmap(jax.random.key)(jnp.arange(4))), each)
    device = jax.devices()[0]
    restored = jax.device_put(target.params, device)
    assert next(iter(restored.values())).committed
    twin = Sampler(target, drafter, max_new_tokens=NEW_TOKENS, program_features=EXTRAS)
    result = twin(restored, drafter.params, PROMPTS, sampling(sampler), 7)
    same(result, expected)
    assert not result.tokens.committed  # or programs of the caller would compile twice
    assert sampler.num_compilations == twin.num_compilations == programs


def test_a_rollout_goes_on_as_if_it_had_not_stopped(ask: Any) -> None:
    """Twelve tokens are seven and then five; equal seeds once drew the same numbers again.

    Tokens of a greedy row are the same. A sampled row's are the same without a drafter, or where no step was
    cut, as by this drafter, which is always wrong: a step that was cut is drawn again with new numbers.
    """
    whole, prompts = ask(), Prompts.padded(PROMPTS)
    begun = ask(max_new_tokens=7)
    rest = ask(prompts.after(begun), max_new_tokens=5)
    assert rest.acceptance_lengths.max() == 1
    joined = np.concatenate([begun.tokens[:, :7], rest.tokens[:, :5]], axis=1)
    same(joined, whole.tokens)  # penalties count what was generated before
    assert rest.lengths.tolist() == [5] * 4
    assert rest.num_steps.tolist() == [4] * 4  # the first token belongs to none
    prompts = prompts.after(begun)
    assert prompts.past is not None
    many = prompts.past.replace(
        steps=prompts.past.steps + 1000
    )  # of more calls than caches have room
    same(
        ask(prompts.replace(past=many), max_new_tokens=5).acceptance_lengths,
        rest.acceptance_lengths,
    )
    assert begun.logprobs is not None
    assert rest.logprobs is not None
    for kind in ("target", "sampled"):
        parts = getattr(begun.logprobs, kind)[:, :7], getattr(rest.logprobs, kind)[:, :5]
        expected = getattr(whole.logprobs, kind)
        np.testing.assert_allclose(np.concatenate(parts, axis=1), expected, atol=1e-4)


def test_rows_that_a_stop_ended_do_not_go_on_unless_told_more(ask: Any) -> None:
    whole = ask()
    stops = [[int(whole.tokens[0, 2])], [-1], [-1], [-1]]
    begun = ask(stop_ids=stops, max_new_tokens=5)
    prompts = Prompts.padded(PROMPTS)
    rest = ask(prompts.after(begun), stop_ids=stops)
    assert rest.lengths.tolist() == [0, NEW_TOKENS, NEW_TOKENS, NEW_TOKENS]
    assert rest.finish_reasons.tolist() == [FinishReason.STOP, *[FinishReason.LENGTH] * 3]
    assert rest.num_steps.tolist()[0] == 0
    told = ask(prompts.after(begun, [[9, 9], [], [], []]))
    assert told.lengths.tolist() == [NEW_TOKENS] * 4
    same(told.tokens[1:], rest.tokens[1:])


def test_rows_have_their_own_limits_and_stops(ask: Any) -> None:
    expected = ask()
    tokens = expected.tokens.tolist()
    result = ask(max_new_tokens=[1, 3, NEW_TOKENS, 5])
    assert result.lengths.tolist() == [1, 3, NEW_TOKENS, 5]
    assert (result.finish_reasons == FinishReason.LENGTH).all()
    assert result.tokens[1].tolist() == tokens[1][:3] + [0] * (NEW_TOKENS - 3)
    assert not np.asarray(result.logprobs.target[1, 3:]).any()
    stops = [[tokens[0][4]], [-1], [tokens[2][0]], [-1]]
    result = ask(stop_ids=stops)
    ends = [tokens[0].index(tokens[0][4]) + 1, NEW_TOKENS, 1, NEW_TOKENS]
    assert result.lengths.tolist() == ends
    stop, length = FinishReason.STOP, FinishReason.LENGTH
    assert result.finish_reasons.tolist() == [stop, length, stop, length]


def test_the_host_can_end_rows_inside_a_block(ask: Any) -> None:
    expected = ask()

    def after_five(tokens: Any) -> int | None:
        return 5 if len(tokens) >= 5 else None

    result = ask(stop_at=[after_five, None, None, lambda tokens: None])
    assert result.lengths.tolist() == [5, NEW_TOKENS, NEW_TOKENS, NEW_TOKENS]
    assert result.finish_reasons.tolist()[0] == FinishReason.STOP
    assert result.tokens[0].tolist() == expected.tokens[0, :5].tolist() + [0] * (NEW_TOKENS - 5)
    same(result.tokens[1:], expected.tokens[1:])
    assert not np.asarray(result.logprobs.target[0, 5:]).any()


def test_logprobs_are_those_of_a_teacher_forced_pass(target: LoadedModel, ask: Any) -> None:
    result = ask()
    for row, prompt in enumerate(PROMPTS):
        new = result.tokens[row].tolist()
        text = prompt + new + [0] * (9 - len(prompt))  # one length for all, and so one program
        logits = fakes.forward(target.model_def, target.params, jnp.asarray([text]))
        logprobs = np.asarray(jax.nn.log_softmax(logits[0], axis=-1))[len(prompt) - 1 :]
        of_tokens = logprobs[np.arange(NEW_TOKENS), new]
        np.testing.assert_allclose(result.logprobs.target[row], of_tokens, atol=1e-4)
        if TEMPERATURES[row] == 1.0:  # no filter, no penalty
            np.testing.assert_allclose(result.logprobs.sampled[row], of_tokens, atol=1e-4)


def test_prompts_can_be_taken(ask: Any) -> None:
    padded = Prompts.padded([*PROMPTS, [2, 3]])
    same(padded.take([3, 1]), Prompts(padded.tokens[jnp.asarray([3, 1])], jnp.asarray([9, 2])))
    same(ask(padded.take(np.arange(4))), ask())


def test_an_array_of_prompts_is_all_prompt(ask: Any) -> None:
    prompts = np.asarray([(p * 8)[:16] for p in PROMPTS])
    same(ask(jnp.asarray(prompts)), ask(prompts.tolist()))


def test_wrong_arguments_are_refused_by_name(
    sampler: Sampler, target: LoadedModel, drafter: LoadedModel, ask: Any
) -> None:
    name = next(iter(target.params))
    weight = target.params[name]
    without = {n: w for n, w in target.params.items() if n != name}
    for changes, message in (
        (dict(target_params=without), f"{name}: missing"),
        (dict(target_params=target.params | {"more": weight}), "more: unknown"),
        (dict(target_params=target.params | {name: weight[:1]}), f"{name}: float32.*, expected"),
        (dict(target_params=target.params | {name: weight.astype("bfloat16")}), "bfloat16"),
        (dict(drafter_params=target.params), "missing"),
        (
            dict(drafter_params=None),
            "drafter_params were not given, but this sampler has a drafter",
        ),
        (dict(prompts=[[2], []] * 2), "prompt 1 is empty"),
        (dict(prompts=[[2]] * 3 + [[tiny.VOCAB_SIZE]]), "outside the vocabulary"),
        (
            dict(prompts=Prompts(jnp.ones((4, 3), int), jnp.asarray([1, 2, 3, 4]))),
            "between 1 and 3",
        ),
        (dict(prompts=jnp.ones((4, 5000), int)), "positions; the model has 4096"),
        (dict(seeds=[1, 2]), r"seeds have shape \(2,\); expected 4"),
        (dict(sampling=sampler.sampling(3)), "sampling has 3 rows; expected 4"),
        (dict(stop_at=[None]), "stop_at has 1 entries; expected one for each of 4 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            ask(**changes)
    plain = Sampler(target, None, max_new_tokens=2)
    with pytest.raises(ValueError, match="made for another sampler"):
        ask(sampling=plain.sampling(4))
    with pytest.raises(ValueError, match="this sampler has no drafter"):
        plain(target.params, drafter.params, PROMPTS, plain.sampling(4), range(4))


def test_params_of_other_kinds_are_refused(sampler: Sampler, target: LoadedModel) -> None:
    """By the check itself: the annotations, which only tests enforce, would refuse them before."""
    arrays = {name: np.asarray(a) for name, a in target.params.items()}
    for params in (arrays, [*target.params.values()], None):
        with pytest.raises(ValueError, match=r"the target's params must be jax\.Arrays by name"):
            sampler._known.check("target", target.model_def, params)


def test_inside_jit_anything_may_be_traced(
    sampler: Sampler, target: LoadedModel, drafter: LoadedModel
) -> None:
    """Nothing, or the stop ids alone: JAX once refused both, naming a compiler option."""
    given = (target.params, drafter.params, PROMPTS, sampling(sampler), range(4))
    traced = jax.eval_shape(lambda: sampler(*given))
    assert traced.tokens.shape == (4, NEW_TOKENS)
    stops = jnp.full((4, 2), -1)
    traced = jax.eval_shape(lambda stops: sampler(*given, stop_ids=stops), stops)
    assert traced.lengths.dtype == jnp.int32


def test_there_is_no_gradient(target: LoadedModel) -> None:
    """What to do instead is said. Tokens are numbers like others, inside of a loss too."""
    sampler = Sampler(
        target, None, max_new_tokens=2, program_features=ProgramFeatures(logprobs=True)
    )

    def loss(params: Any, of: str) -> Any:
        result = sampler(params, None, PROMPTS)
        used = result.tokens.astype(jnp.float32) if of == "tokens" else result.logprobs.target
        return jnp.sum(used) + jnp.sum(params["final_norm"])

    for gradient in (jax.grad(loss), jax.grad(jax.jit(loss, static_argnums=1))):
        with pytest.raises(ValueError, match=r"recompute .* with jaxspec\.score\(sampler, params"):
            jax.eval_shape(lambda params, of=gradient: of(params, "logprobs"), target.params)
    found = jax.eval_shape(lambda params: jax.grad(loss)(params, "tokens"), target.params)
    assert found.keys() == target.params.keys()


@pytest.mark.parametrize("axes", [("data", "model"), ("data", "fsdp", "model")])
def test_a_mesh_of_any_kind_may_be_around_it(
    sampler: Sampler, target: LoadedModel, drafter: LoadedModel, axes: tuple[str, ...]
) -> None:
    """Types alone, for which one device is enough: `test_sharding` runs it on eight."""
    mesh = jax.make_mesh((1,) * len(axes), axes)  # of explicit axes, as JAX makes it
    whole, rows = PartitionSpec(), PartitionSpec("data")
    spread = NamedSharding(mesh, PartitionSpec(axes[-2]))
    params = jax.device_put((target.params, drafter.params), spread)
    values = sampling(sampler)

    def run(params: Any, prompts: Prompts, seeds: Any) -> GenerateResult:
        return sampler(*params, prompts, values, seeds)

    given = (Prompts.padded(PROMPTS), jnp.arange(4))
    with jax.set_mesh(mesh):
        result = jax.eval_shape(run, params, *given)
    mesh = jax.make_mesh((1,) * len(axes), axes, axis_types=(AxisType.Auto,) * len(axes))
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(whole, rows, rows), out_specs=rows)
    again = jax.eval_shape(mapped, (target.params, drafter.params), *given)
    assert result.tokens.shape == again.tokens.shape == (4, NEW_TOKENS)


def test_a_logits_fn_has_to_keep_the_shape(target: LoadedModel) -> None:
    for wrong, message in (
        (
            lambda logits, positions: logits[..., :9],
            r"returns float32\[4, 1, 9\]; .* float32\[4, 1, 160\]",
        ),
        (lambda logits, positions: logits.astype("bfloat16"), "returns bfloat16"),
    ):
        sampler = Sampler(
            target, None, max_new_tokens=2, program_features=ProgramFeatures(logits_fn=wrong)
        )
        with pytest.raises(FieldError, match=message):
            sampler(target.params, None, PROMPTS)


def test_what_needs_the_host_is_refused_in_jit(sampler: Sampler, target: LoadedModel) -> None:
    given = (None, Prompts.padded(PROMPTS), sampler.sampling(4), jnp.arange(4))
    with pytest.raises(ValueError, match="stop_at needs the host"):
        jax.jit(lambda p: sampler(p, *given, stop_at=len))(target.params)
    with pytest.raises(ValueError, match="streaming needs the host"):
        jax.jit(lambda p: next(sampler.stream(p, *given)))(target.params)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(temperature=-1.0), "temperature is -1; it must be from 0 to 1e6"),
        (dict(temperature=[0, 1]), r"temperature has shape \(2,\); expected one value, or 4"),
        (dict(top_p=0.0), r"top_p is 0; it must be in \(0, 1\]"),
        (dict(min_p=1.5), r"min_p is 1.5; it must be in \[0, 1\]"),
        (dict(top_k=-3), "top_k is -3"),
        (dict(top_k=2**31), "top_k is 2147483648; it must be 0 or more; 0: off, and below"),
        (dict(top_k=np.array([2**40, 0, 0, 0])), "top_k is 1099511627776; it must be 0 or more"),
        (dict(repetition_penalty=0.0), "repetition_penalty is 0; it must be from 1e-6 to 1e6"),
        (dict(frequency_penalty=np.inf), "frequency_penalty is inf; it must be from -1e6 to 1e6"),
        (dict(bias_ids=[[1]] * 4), "the sampler's num_biases"),
        (dict(top_k=1.5), "top_k has the dtype float64; it must be whole numbers"),
        (dict(temperature=True), "temperature has the dtype bool; it must be numbers"),
        (dict(heat=1.0), "heat is not a sampling value; known are temperature"),
    ],
)
def test_sampling_values_out_of_range_are_refused(
    sampler: Sampler, values: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sampler.sampling(4, **values)


def test_a_stop_at_the_very_end_is_a_stop(
    sampler: Sampler, target: LoadedModel, drafter: LoadedModel
) -> None:
    """And such rows do not go on."""
    most, prompts = sampler.max_new_tokens, Prompts.padded(PROMPTS)
    weights = target.params, drafter.params
    stop = lambda tokens: len(tokens) if len(tokens) == most else None  # noqa: E731
    result = sampler(*weights, prompts, stop_at=stop)
    full = np.asarray(result.lengths) == most
    assert full.any()
    assert (np.asarray(result.finish_reasons)[full] == FinishReason.STOP).all()
    more = sampler(*weights, prompts.after(result))
    assert (np.asarray(more.lengths)[full] == 0).all()
    with pytest.raises(ValueError, match="stop_at returned a value that is -1"):
        sampler(*weights, prompts, stop_at=lambda tokens: -1)


def test_prompts_that_are_not_there_cannot_be_taken() -> None:
    prompts = Prompts.padded(PROMPTS)
    for rows, said in (([len(PROMPTS)], "rows has 4"), ([-1], "rows has -1")):
        with pytest.raises(ValueError, match=said):
            prompts.take(rows)


def test_options_that_cannot_be_meant_are_refused(
    target: LoadedModel, drafter: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        (dict(max_new_tokens=0), "max_new_tokens is 0"),
        (dict(stop_ids=(10**6,)), "stop_ids: got 1000000; expected whole numbers"),
        (dict(max_new_tokens=4096), "max_new_tokens is 4096; the model has 4096 positions"),
        (dict(max_new_tokens=4, num_samples=0), "num_samples is 0"),
        (dict(max_new_tokens=4, drafting=Drafting(9)), "proposes 1 to 3 tokens"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            Sampler(target, drafter, **options)
    sampler = Sampler(target, None, max_new_tokens=4, num_samples=1000)
    monkeypatch.setattr("jaxspec.weights.memory.bytes_limit", lambda mesh: 1 << 20)
    given = (target.params, None, PROMPTS, sampler.sampling(4000), np.zeros(4000, int))
    with pytest.raises(ValueError, match=r"4000 rows .* GiB a device .* caches, .* has 0\.0 GiB: "):
        sampler(*given)


def test_biases_ban_and_prefer(target: LoadedModel) -> None:
    sampler = Sampler(
        target, None, max_new_tokens=6, program_features=ProgramFeatures(num_biases=2)
    )
    given = (target.params, None, PROMPTS)
    free = sampler(*given, sampler.sampling(4), range(4)).tokens.tolist()
    banned = sampler.sampling(4, bias_ids=[[r[0]] for r in free], bias_values=[[-np.inf]] * 4)
    for row, was in zip(sampler(*given, banned, range(4)).tokens.tolist(), free, strict=True):
        assert was[0] not in row
    wanted = sampler.sampling(4, bias_ids=[[9, -1]] * 4, bias_values=[[1e4, 0.0]] * 4)
    assert (sampler(*given, wanted, range(4)).tokens == 9).all()


def test_it_works_out_what_it_can(target: LoadedModel, drafter: LoadedModel) -> None:
    """A pair, one record for all rows, and one seed: row i draws as request i of an engine does."""
    ask = Sampler((target, drafter), max_new_tokens=6)
    weights = target.params, drafter.params
    greedy = ask(*weights, PROMPTS)
    same(greedy.tokens, ask(*weights, PROMPTS, ask.sampling(4), np.arange(4)).tokens)
    sampled = ask(*weights, PROMPTS, Sampling(temperature=1.0, top_k=50), 7)
    requests = [Request(tuple(p), 6, Sampling(temperature=1.0, top_k=50), seed=7) for p in PROMPTS]
    engine = Engine(target, drafter, batch_size=4)
    done = sorted((e.id, e.token_ids) for e in engine.run(requests) if isinstance(e, Completion))
    assert [list(tokens) for _, tokens in done] == sampled.tokens.tolist()
    jitted = jax.jit(lambda t, d, seed: ask(t, d, jnp.asarray([PROMPTS[0]] * 2), seeds=seed))
    assert jitted(*weights, 7).tokens.tolist() == [greedy.tokens[0].tolist()] * 2
    with pytest.raises(
        ValueError, match="presence_penalty is 1, but the sampler was made without penalties=True"
    ):
        ask(*weights, PROMPTS, Sampling(presence_penalty=1.0))
    with pytest.raises(ValueError, match=r"prompt 0 has the id 2\.5; expected whole numbers"):
        check_ids(
            "prompt 0", [2.5]
        )  # which `Prompts.padded` asks; annotations would refuse it before
