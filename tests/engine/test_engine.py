"""Slots and requests: nobody notices the neighbours, and what is reported adds up."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any
from unittest import mock

import numpy as np
import pytest

import jaxspec
from jaxspec.engine import scheduler as scheduler_module
from jaxspec.engine import slots
from jaxspec.engine.engine import Completion, Engine, Request, Update
from jaxspec.engine.request import num_positions
from jaxspec.options import FieldError, Sampling
from jaxspec.runtime import prefill, runtime
from tests.cases import (
    CACHE_LENGTH,
    NEW_TOKENS,
    SLOTS,
    case,
    completions,
    request,
    resampled,
    run,
    until_stop,
)

NAME = "31b"
ADJUSTED: dict[str, Any] = dict(penalties=True, num_biases=2, logprobs=True, top_logprobs=3)


def requests(temperature: float = 0.0) -> list[Request]:
    """Return eight requests that differ in all that a request can differ in."""
    filters = [(0, 1.0), (5, 1.0), (0, 0.8), (20, 0.9)]
    return [
        request(
            prompt,
            NEW_TOKENS - row,
            temperature=temperature and temperature + 0.1 * row,
            top_k=filters[row % 4][0],
            top_p=filters[row % 4][1],
            seed=row,
        )
        for row, prompt in enumerate(case(NAME).prompts)
    ]


def stepped(engine: Engine, requests: list[Request]) -> list[Completion]:
    """Return the completions of an engine as it is, whose scheduler `Engine.run` would replace."""
    for i, r in enumerate(requests):
        engine.add(dataclasses.replace(r, id=i))
    events: list[Any] = []
    while not engine.is_idle:
        events += engine.step()
    return completions(events, len(requests))


@pytest.fixture(params=[None, "mixed"])
def engine(request) -> Engine:
    return case(NAME).engine(request.param)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_does_not_depend_on_its_neighbours(engine, temperature):
    """Each request alone, which shares its slots with nobody, and all of them in one batch."""
    asked = requests(temperature)
    together = run(engine, asked)
    for index in (0, 3, 6):
        nobody = dataclasses.replace(asked[index], prompt_ids=())  # refused: takes no slot
        alone = run(engine, [asked[i] if i == index else nobody for i in range(len(asked))])
        assert alone[index] == together[index]
        assert all(d.error for i, d in enumerate(alone) if i != index)


def test_a_row_does_not_depend_on_its_slot_or_on_order(engine):
    """Greedy requests backwards, and sampled ones that other lengths before them move to other slots."""
    asked = requests()
    backwards = run(engine, asked[::-1])[::-1]
    for one, other in zip(run(engine, asked), backwards, strict=True):
        assert one.token_ids == other.token_ids
        assert one.acceptance_lengths == other.acceptance_lengths
    asked = requests(1.0)
    shorter = [
        dataclasses.replace(r, max_new_tokens=1 + i) if i < SLOTS else r
        for i, r in enumerate(asked)
    ]
    for row, (one, other) in enumerate(zip(run(engine, asked), run(engine, shorter), strict=True)):
        short = len(other.token_ids)
        assert one.token_ids[:short] == other.token_ids
        assert short == len(one.token_ids) or row < SLOTS


def test_a_row_takes_part_in_passes_of_the_same_shapes_in_any_company(monkeypatch):
    """In bfloat16 products of other shapes round otherwise, and GPUs wrote other texts in other orders.

    Rows were prefilled with whoever came at the same time, and as wide as the longest of them.
    """
    monkeypatch.setattr(prefill, "SHARED_WIDTHS", (8,))
    monkeypatch.setattr(prefill, "SHARED_PREFILL", 64)
    c = case(NAME)
    engine = c.engine("mixed", **ADJUSTED)
    passes: dict[int, list[tuple[int, ...]]] = {}  # by the prompt's first token

    def remember(state, chunk, ask, tables):
        for row in np.flatnonzero(np.asarray(chunk.count)):
            slot, start, count = (int(x[row]) for x in (chunk.slots, chunk.start, chunk.count))
            if start == 0:
                in_slot[slot] = int(chunk.tokens[row, 0])
                passes[in_slot[slot]] = []
            passes[in_slot[slot]].append((*chunk.tokens.shape, start, count))
        return feeding(state, chunk, ask, tables)

    in_slot: dict[int, int] = {}
    feeding = engine.runtime.bind_prefill
    monkeypatch.setattr(engine.runtime, "bind_prefill", remember)
    asked = [dataclasses.replace(r, stop_ids=(9,)) for r in requests()]
    expected = run(engine, asked)
    assert [passes[20 + i] for i in (1, 2, 3)] == [
        [(4, 8, 0, 5)],
        [(4, 16, 0, 16)],
        [(4, 16, 0, 16), (4, 16, 16, 16), (4, 8, 32, 5)],
    ]
    all_passes = dict(passes)
    programs = engine.num_compilations
    for order in ([7, 6, 5, 4, 3, 2, 1, 0], [4, 7, 0, 3, 6, 1, 5, 2], [3], [0, 6], [5, 1, 3]):
        passes.clear()
        done = run(engine, [asked[i] for i in order])
        assert [dataclasses.replace(d, id=i) for i, d in zip(order, done, strict=True)] == [
            expected[i] for i in order
        ]
        assert passes == {20 + i: all_passes[20 + i] for i in order}
    assert engine.num_compilations == programs


@pytest.mark.parametrize(
    ("batch_size", "left", "shape"),
    [
        (1, 5, (1, 16)),  # one row is padded little: it has no other's programs to share
        (1, 100, (1, 128)),
        (1, 600, (1, 512)),
        (2, 5, (2, 64)),
        (8, 64, (4, 64)),
        (8, 65, (1, 256)),
        (8, 257, (1, 512)),
    ],
)
def test_shapes_of_prefill(batch_size, left, shape, monkeypatch):
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", 512)
    shapes = case(NAME).engine(None, batch_size=batch_size).runtime.shapes
    width = shapes.width(left)
    assert (shapes.small_rows(width), width) == shape


def test_a_greedy_row_beside_sampled_rows(engine):
    asked = requests(1.0)
    asked[2] = resampled(asked[2], temperature=0.0)
    count = asked[2].max_new_tokens
    assert run(engine, asked)[2].token_ids == case(NAME).continuation(2, count)


def test_each_row_adjusts_its_own_logits():
    """What a row adjusts is its own business, and new values compile nothing."""
    c = case(NAME)
    engine = c.engine("mixed", **ADJUSTED)
    first = c.continuation(1)[0]
    asked = [
        request(c.prompts[0], NEW_TOKENS, temperature=1.0, min_p=1.0),
        request(c.prompts[1], 6, logit_bias={first: -np.inf}),
        request(c.prompts[2], 6, temperature=1.0, logit_bias={9: 1e4, 8: 1e4 - 100}),
        request(c.prompts[3], 12, repetition_penalty=1e6, frequency_penalty=1e4),
    ]
    done = run(engine, asked)
    assert done[0].token_ids == c.continuation(0)  # only the likeliest is likely enough
    for place, best in enumerate(done[0].top_logprobs):
        assert best[0] == (done[0].token_ids[place], done[0].logprobs[place])
        assert len(best) == 3
        assert best[0][1] >= best[1][1] >= best[2][1]
    assert first not in done[1].token_ids
    assert done[2].token_ids == (9,) * 6
    assert len({*done[3].token_ids, *c.prompts[3]}) == 12 + len(set(c.prompts[3]))
    count = engine.num_compilations
    changed = [
        resampled(asked[0], presence_penalty=1e4),
        *[resampled(r, logit_bias={7: 1e6}) for r in asked[1:]],
    ]
    done = run(engine, changed)
    assert len(set(done[0].token_ids)) == NEW_TOKENS
    assert [d.token_ids for d in done[1:3]] == [(7,) * 6] * 2
    assert engine.num_compilations == count


def test_an_engine_that_fits_has_what_requests_ask_for_and_no_more():
    c = case(NAME)
    plain = request(c.prompts[0], 4, temperature=1.0, min_p=0.1)
    spec = Engine.fitting(c.target, None, [plain]).spec
    assert (spec.program_features.penalties, spec.program_features.num_biases) == (False, 0)
    biased = resampled(plain, logit_bias={1: 1.0, 2: 2.0, 3: 3.0})
    penalized = resampled(plain, presence_penalty=0.1)
    spec = Engine.fitting(c.target, None, [plain, biased, penalized]).spec
    assert (spec.program_features.penalties, spec.program_features.num_biases) == (True, 4)


def test_seeds_and_indices_make_the_draws(engine):
    prompt = case(NAME).prompts[1]

    def sample(seed: int) -> list[tuple[int, ...]]:
        asked = [request(prompt, 12, temperature=1.0, seed=seed)] * SLOTS
        return [d.token_ids for d in run(engine, asked)]

    first = sample(0)
    assert first == sample(0)
    assert len({*first, *sample(1)}) == 2 * SLOTS  # equal requests differ by their place
    assert first != sample(2**31)


def test_returns_to_the_host_change_nothing():
    """One step a return or many: the same completions, and updates that only ever add."""
    asked = requests(0.7)
    asked[1] = resampled(asked[1], temperature=0.0)
    results = []
    for steps in (1, 3, 100):
        events = list(case(NAME).engine("mixed", steps_per_return=steps).run(asked))
        results.append(completions(events, len(asked)))
        for index, done in enumerate(results[-1]):
            updates = [e.token_ids for e in events if isinstance(e, Update) and e.id == index]
            assert updates[-1] == done.token_ids
            lengths = [len(u) for u in updates]
            assert lengths == sorted(set(lengths))
            assert all(done.token_ids[: len(u)] == u for u in updates)
            last = max(i for i, e in enumerate(events) if e.id == index)
            assert isinstance(events[last], Completion)
        if steps == 1:  # every step is seen: prefill's token, then one update a step
            assert all(
                len(done.acceptance_lengths) + 1
                == sum(isinstance(e, Update) and e.id == i for e in events)
                for i, done in enumerate(results[-1])
            )
    assert results[0] == results[1] == results[2]


def test_statistics_add_up(engine):
    """Tokens after prefill's are at most what the steps committed, and a cut is less than one step."""
    drafts = engine.spec.num_draft_tokens
    for done in run(engine, requests()) + run(engine, requests(1.0)):
        rest = len(done.token_ids) - 1
        committed = done.acceptance_lengths
        assert all(1 <= tau <= drafts + 1 for tau in committed)
        assert sum(committed[:-1]) < rest <= sum(committed)
    total = engine.timings.decode_tokens
    assert total == 2 * sum(r.max_new_tokens - 1 for r in requests())


def test_stop_at_ends_a_row(engine):
    """The host cuts where it says; the slot goes to the next request, whose tokens are its own."""
    c = case(NAME)

    def at(place: int):
        seen = []

        def stop_at(tokens):
            seen.append(len(tokens))
            target = c.continuation(row, place)
            return place if tuple(tokens[:place]) == target else None

        row = len(asked)
        return stop_at, seen

    asked, calls = [], []
    for row, prompt in enumerate(c.prompts):
        stop_at, seen = at(row + 1) if row % 2 == 0 else (None, [])
        asked.append(Request(prompt, NEW_TOKENS, stop_at=stop_at))
        calls.append(seen)
    engine.steps_per_return = 2
    for row, done in enumerate(run(engine, asked)):
        if row % 2 == 0:
            assert done.token_ids == c.continuation(row, row + 1)
            assert done.finish_reason == "stop"
            assert calls[row] == sorted(set(calls[row]))  # never twice with the same tokens
        else:
            assert done.token_ids == c.continuation(row)
            assert done.finish_reason == "length"


def test_stop_at_may_keep_nothing():
    engine = case(NAME).engine(None)
    (done,) = run(engine, [Request(case(NAME).prompts[0], 5, stop_at=lambda tokens: 0)])
    assert (done.token_ids, done.finish_reason) == ((), "stop")
    assert engine.timings.decode_tokens == 0


@pytest.mark.parametrize("returned", [2.0, "x", -1, True])
def test_a_stop_at_that_returns_no_count_ends_its_request_only(returned):
    engine, c = case(NAME).engine(None, batch_size=2), case(NAME)
    asked = [Request(c.prompts[0], 5, stop_at=lambda tokens: returned), Request(c.prompts[1], 5)]
    bad, good = run(engine, asked)
    assert bad.finish_reason == "error"
    assert "stop_at returned a value that is" in bad.error
    assert good.token_ids == c.continuation(1, 5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(num_stop_ids=-1), "num_stop_ids is -1; it must be 0 or more"),
        (dict(cache_length=1), "cache_length=1: a prompt of one token with a new one takes"),
    ],
)
def test_engines_that_can_serve_nobody_are_refused(options, says):
    with pytest.raises(FieldError, match=says):
        case(NAME).engine(None, **options)


def test_more_stop_ids_in_a_later_run(engine):
    """Programs were once kept by name alone, and retiring a row met a state with more stop ids."""
    c = case(NAME)
    stop_at = lambda tokens: 2 if len(tokens) > 1 else None  # noqa: E731
    tokens = c.continuation(0)
    for count in (1, 6):
        ids = (*tuple(i for i in range(20) if i not in tokens)[: count - 1], tokens[5])
        asked = [
            Request(c.prompts[0], NEW_TOKENS, stop_ids=ids),
            Request(c.prompts[1], NEW_TOKENS, stop_at=stop_at),
        ]
        first, second = run(engine, asked)
        assert first.token_ids == until_stop(tokens, ids)
        assert second.token_ids == c.continuation(1, 2)


def test_one_bad_request_is_refused_and_the_rest_run(engine):
    c = case(NAME)
    good = Request(c.prompts[1], 3)
    bad = {
        "empty": dataclasses.replace(good, prompt_ids=()),
        "outside the vocabulary": dataclasses.replace(good, prompt_ids=(5, 160)),
        "[-1]": dataclasses.replace(good, prompt_ids=(-1,)),
        "max_new_tokens is 0": dataclasses.replace(good, max_new_tokens=0),
        "made without penalties=True": resampled(good, presence_penalty=1.0),
        "logit_bias 160 is outside": resampled(good, logit_bias={160: 1.0}),
        "pass num_biases=1": resampled(good, logit_bias={4: 1.0}),
        "logprobs is on, but": resampled(good, logprobs=True),
        "top_logprobs is 2, but": resampled(good, top_logprobs=2),
        "sample is -1; it must be": dataclasses.replace(good, sample=-1),
        "seed is 1099511627776; it must be": dataclasses.replace(good, seed=2**40),
        "the model has 1024": dataclasses.replace(good, max_new_tokens=1024),
        "pass cache_length=": dataclasses.replace(good, max_new_tokens=CACHE_LENGTH),
    }
    asked = [
        good,
        *bad.values(),
        resampled(dataclasses.replace(good, seed=2**32 - 1), top_k=2**31 - 1),
    ]
    done = run(engine, asked)
    for text, refused in zip(bad, done[1:-1], strict=True):
        assert refused.error
        assert text in refused.error
        assert refused.token_ids == ()
    for accepted in (done[0], done[-1]):
        assert accepted.error is None
        assert accepted.token_ids == c.continuation(1, 3)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (dict(temperature=-0.1), "temperature is -0.1; it must be from 0 to 1e6"),
        (dict(temperature=float("inf")), "temperature is inf"),
        (dict(temperature=float("nan")), "temperature is nan"),
        (dict(top_k=-1), "top_k is -1"),
        (dict(top_p=0.0), "top_p is 0;"),
        (dict(top_p=1.5), "top_p is 1.5"),
        (dict(top_p=float("nan")), "top_p is nan"),
        (dict(min_p=-0.5), r"min_p is -0.5; it must be in \[0, 1\]"),
        (dict(repetition_penalty=0), "repetition_penalty is 0;"),
        (dict(logit_bias={4: float("nan")}), "logit_bias of 4 is nan"),
    ],
)
def test_values_of_sampling_out_of_range_are_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Sampling(**values)


def test_a_request_that_just_fits(engine):
    """The cache is as long as `cache_length_for` says, to the position."""
    c = case(NAME)
    prompt = c.prompts[3]
    most = CACHE_LENGTH - engine.spec.step_tokens - len(prompt)
    longest = Request(prompt, most)
    assert num_positions(engine.spec, longest) == CACHE_LENGTH
    assert engine.check(longest) is None
    assert engine.check(dataclasses.replace(longest, max_new_tokens=most + 1))
    (done,) = run(engine, [longest])
    known = c.continuation(3, most)  # may end a token earlier
    assert len(done.token_ids) == most
    assert done.token_ids[: len(known)] == known


def test_generate_takes_a_cache_length():
    """What fits a neighbour else decides it, and caches of another length may round otherwise."""
    c = case(NAME)
    options: dict[str, Any] = dict(max_new_tokens=5, batch_size=SLOTS, ignore_eos=True)
    alone = jaxspec.Pair(c.target)
    (done,) = jaxspec.generate(alone, c.prompts[2:3], cache_length=CACHE_LENGTH, **options)
    assert done.token_ids == c.continuation(2, 5)
    with pytest.raises(ValueError, match=r"cache holds 20 positions, .*pass cache_length=22"):
        jaxspec.generate(alone, c.prompts[2:3], cache_length=20, **options)


def test_all_refused_starts_nothing(engine):
    (done,) = run(engine, [Request((), 5)])
    assert done.error
    assert list(engine.run([])) == []
    assert engine.num_compilations == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(batch_size=0), "must be 1 or more"),
        (dict(num_draft_tokens=5), "proposes 1 to 4"),
        (dict(num_draft_tokens=0), "num_draft_tokens is 0; it must be 1 or more"),
        (dict(synthetic_acceptance=6.0), "between 1 and 5"),
    ],
)
def test_engine_refuses_numbers_out_of_range(options, text):
    with pytest.raises(ValueError, match=text):
        case(NAME).engine("mixed", **options)
    with pytest.raises(ValueError, match="there is no drafter"):
        case(NAME).engine(None, num_draft_tokens=2)


def test_synthetic_acceptance_runs_the_whole_step():
    """For benchmarks: every step commits about as many as asked, whatever the drafts are worth."""
    engine = case(NAME).engine("hostile", synthetic_acceptance=2.5)
    taus = np.concatenate([d.acceptance_lengths for d in run(engine, requests())])
    assert set(taus.tolist()) == {2, 3}


@pytest.mark.parametrize(
    ("length", "bucket"), [(1, 128), (128, 128), (129, 256), (1025, 1280), (5000, 5120)]
)
def test_cache_buckets(length: int, bucket: int) -> None:
    assert runtime.cache_bucket(length) == bucket


def test_an_interrupted_step_can_be_taken_again(engine, monkeypatch):
    """Ctrl-C comes while the host waits for the device: nothing that the device did is lost."""
    asked = requests()[:SLOTS]
    expected = run(engine, asked)
    waits, real = iter(range(100)), slots.Slots.wait

    def wait(self: slots.Slots) -> float:
        if next(waits) % 2 == 0:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(slots.Slots, "wait", wait)
    names, done = [engine.add(request) for request in asked], {}
    while not engine.is_idle:
        try:
            done |= {e.id: e for e in engine.step() if isinstance(e, Completion)}
        except KeyboardInterrupt:
            continue
    assert [done[name].token_ids for name in names] == [d.token_ids for d in expected]


def test_events_are_made_while_the_device_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """It idled between two calls for as long as the host made tuples of all tokens."""
    made, order = case(NAME).engine("mixed", batch_size=2), list[str]()

    def noted(name: str, real: Any) -> Any:
        return lambda *args: (order.append(name), real(*args))[1]

    for owner, name in ((slots.Slots, "launch"), (slots.Row, "updates")):
        monkeypatch.setattr(owner, name, noted(name, getattr(owner, name)))
    for asked in requests()[:2]:
        made.add(asked)
    while not made.is_idle:
        order.clear()
        made.step()
        assert order.count("launch") == (not made.is_idle)
        assert "launch" not in order[1:]
    assert order == ["updates"] * len(order)


def test_what_ended_is_told_after_a_step_that_was_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    c = case("31b")
    engine = c.engine("mixed", batch_size=2)
    left, stays = (engine.add(Request(c.prompts[i], 4)) for i in (0, 1))
    engine.cancel(left)
    with monkeypatch.context() as patch:
        patch.setattr(engine._scheduler, "step", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    done = {}
    while not engine.is_idle:
        done |= {e.id: e for e in engine.step() if isinstance(e, Completion)}
    assert done[left].finish_reason == "cancelled"
    assert done[stays].token_ids == c.continuation(1, 4)


def test_rows_decode_one_step_between_passes_over_pending_prompts() -> None:
    """A burst of prompts paused rows that decode for whole calls between two passes, or for all passes."""
    made = case(NAME).engine("mixed", batch_size=4, max_prefill_tokens=1, steps_per_return=4)
    made.add(request(case(NAME).prompts[0], NEW_TOKENS))
    while not made.num_running or not made._scheduler.running:
        made.step()
    for prompt in case(NAME).prompts[1:4]:
        made.add(request(prompt, NEW_TOKENS))
    calls: list[str] = []
    scheduler = made._scheduler
    prefilled, decoded = scheduler._prefill, made.runtime.bind_decode
    steps: list[int] = []

    def prefill() -> None:
        calls.append("pass")
        prefilled()

    def bind(state: Any, output: Any, max_steps: int, *args: Any) -> Any:
        calls.append("steps")
        steps.append(max_steps)
        return decoded(state, output, max_steps, *args)

    scheduler._prefill = prefill  # type: ignore[method-assign]
    made.runtime.bind_decode = bind  # type: ignore[method-assign]
    while not made.is_idle:
        made.step()
    last = len(calls) - calls[::-1].index("pass")
    between = calls[calls.index("pass") : last]
    assert between.count("pass") > 1
    assert all(pair != ("pass", "pass") for pair in itertools.pairwise(between))
    first = calls[: calls.index("pass")].count("steps")
    assert set(steps[first : first + between.count("steps")]) == {1}
    assert max(steps) == 4


def test_a_pass_that_is_not_full_waits_one_call_for_prompts_that_wait() -> None:
    """Where pages are short, each row that ended let one prompt in, and each had a pass of its own."""
    made = case(NAME).engine("mixed", batch_size=2, read_ahead=2, steps_per_return=1)
    scheduler = made._scheduler
    for i in range(8):
        made.add(request(case(NAME).prompts[i % 4], NEW_TOKENS, seed=i))
    kinds: list[tuple[str, bool]] = []
    prefilled, decoded = scheduler._prefill, scheduler._decode

    def prefill() -> None:
        full = scheduler._planner.num_left >= made.runtime.shapes.full
        kinds.append(("pass", full or not scheduler.waiting or not scheduler.running))
        prefilled()

    def decode(max_steps: int) -> None:
        kinds.append(("steps", True))
        decoded(max_steps)

    scheduler._prefill, scheduler._decode = prefill, decode  # type: ignore[method-assign]
    done = [e for _ in range(400) for e in made.step() if isinstance(e, Completion)]
    assert len(done) == 8
    # Before a pass that is not full while others wait, rows decoded.
    for before, (kind, may_follow) in itertools.pairwise(kinds):
        if kind == "pass" and not may_follow:
            assert before[0] == "steps"
    assert any(kind == "pass" and not may_follow for kind, may_follow in kinds)


def test_a_row_that_sent_tokens_gets_some_of_every_decode_call() -> None:
    """A row that was read ahead sent its first token at once, and the next ones seconds later."""
    made = case(NAME).engine("mixed", batch_size=2, read_ahead=2, steps_per_return=2)
    for i in range(8):
        made.add(request(case(NAME).prompts[i % 4], NEW_TOKENS, id=i, seed=i))
    began: set[Any] = set()
    first: dict[Any, int] = {}
    while not made.is_idle:
        events = made.step()
        updates = {e.id: len(e.token_ids) for e in events if isinstance(e, Update)}
        if began & updates.keys():  # a decode call
            assert began <= updates.keys()
        first |= {id: count for id, count in updates.items() if id not in first}
        began |= updates.keys()
        began -= {e.id for e in events if isinstance(e, Completion)}
    assert set(first) == set(range(8))
    assert set(first.values()) == {1}


def test_decode_calls_have_no_more_steps_than_running_rows_may_wait_for(monkeypatch) -> None:
    """With 134 rows of 26B-A4B, 16 steps kept all rows waiting for 0.7 seconds."""
    asked = [request(prompt, NEW_TOKENS) for prompt in case(NAME).prompts[:4]]
    plain = run(case(NAME).engine("mixed", batch_size=2), asked)
    made = case(NAME).engine("mixed", batch_size=2)
    scheduler = made._scheduler
    scheduler._is_timed = True
    decoded, wait, taken_s = made.runtime.bind_decode, slots.Slots.wait, [0.0]
    prefilled, passes = scheduler._prefill, [0]
    calls: list[tuple[int, bool, int, bool]] = []

    def prefill() -> None:
        passes[0] += 1
        prefilled()

    def bind(state: Any, output: Any, max_steps: int, *args: Any) -> Any:
        calls.append(
            (max_steps, bool(scheduler.waiting), passes[0], bool(scheduler._planner.pending))
        )
        passes[0], taken_s[0] = 0, 0.06
        return decoded(state, output, max_steps, *args)

    def waited(self: slots.Slots) -> float:
        wait(self)
        steps = max(map(len, self.new_acceptance_lengths), default=0)
        return taken_s[0] * steps if steps else 0.1

    monkeypatch.setattr(scheduler, "_prefill", prefill)
    monkeypatch.setattr(made.runtime, "bind_decode", bind)
    monkeypatch.setattr(slots.Slots, "wait", waited)
    assert [c.token_ids for c in stepped(made, asked)] == [c.token_ids for c in plain]
    assert calls[0][:2] == (scheduler_module.FIRST_STEPS, True)
    # 0.23 seconds are left beside the host's work, and 0.1 fewer for each pass that came or may come.
    assert any(before and not waits for _, waits, before, _ in calls)
    for steps, waits, before, is_between_passes in calls[1:]:
        assert before < 2
        assert steps == (1 if is_between_passes else 2 if before or waits else 3)


@pytest.mark.parametrize(("pass_s", "in_a_row"), [(0.2, 1), (0.1, 1), (0.06, 2), (0.04, 4)])
def test_passes_follow_each_other_while_running_rows_may_wait(
    monkeypatch: pytest.MonkeyPatch, pass_s: float, in_a_row: int
) -> None:
    """A step of few rows, which takes nearly as long as one of all, followed each pass over a burst of prompts.

    The step after the passes may take twice the 0.03 seconds of the last one.
    """
    asked = [request(prompt, NEW_TOKENS) for prompt in case(NAME).prompts[:8]]
    plain = run(case(NAME).engine("mixed", batch_size=8), asked)
    made = case(NAME).engine("mixed", batch_size=8)
    scheduler = made._scheduler
    scheduler._is_timed = True
    prefilled, wait, calls = scheduler._prefill, slots.Slots.wait, list[str]()

    def prefill() -> None:
        calls.append("pass" if scheduler.running else "first pass")
        prefilled()

    def waited(self: slots.Slots) -> float:
        wait(self)
        steps = max(map(len, self.new_acceptance_lengths), default=0)
        calls.extend(["steps"] if steps else [])
        return 0.03 * steps if steps else pass_s

    # Passes of one row, so that there are some.
    monkeypatch.setattr(type(made.runtime.shapes), "small_rows", lambda self, width: 1)
    monkeypatch.setattr(type(made.runtime.shapes), "full_rows", lambda self, width: 1)
    monkeypatch.setattr(scheduler, "_prefill", prefill)
    monkeypatch.setattr(slots.Slots, "wait", waited)
    assert [c.token_ids for c in stepped(made, asked)] == [c.token_ids for c in plain]
    runs = [len([*of]) for kind, of in itertools.groupby(calls) if kind == "pass"]
    assert sum(runs) >= 7
    assert max(runs) == in_a_row


def test_passes_are_narrow_where_running_rows_waited_too_long() -> None:
    made = case(NAME).engine("mixed", batch_size=2)
    scheduler = made._scheduler
    scheduler._is_timed, scheduler._pass_width = True, 4096

    def narrow_from(taken_s: float, end: int) -> float:
        scheduler._planner.last_ends = {0: end, 1: 300}
        scheduler._learn_width(taken_s)
        return scheduler._narrow_from

    assert narrow_from(0.4, 8192) == math.inf  # something else was slow
    assert narrow_from(0.1, 40_000) == math.inf
    assert narrow_from(0.4, 40_000) == 40_000 - 4096
    assert narrow_from(0.4, 100_000) == 40_000 - 4096
    made.add(request(case(NAME).prompts[0], NEW_TOKENS))
    seen = []
    while not made.is_idle:
        made.step()
        seen.append((bool(scheduler.running), scheduler._planner.narrow_from))
    assert (True, 40_000 - 4096) in seen
    assert seen[0] == (False, math.inf)  # no row waits


def test_an_interrupt_on_a_mesh_loses_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """There a step waits for the call that it launched, after it made the events of the call before."""
    asked = [request(prompt, NEW_TOKENS, id=i) for i, prompt in enumerate(case(NAME).prompts[:4])]
    plain = run(case(NAME).engine("mixed", batch_size=2, steps_per_return=2), asked)
    made = case(NAME).engine("mixed", batch_size=2, steps_per_return=2)
    made._scheduler._keeps_order = True
    waited, calls = slots.Slots.wait_for_device, itertools.count()

    def wait(self: slots.Slots) -> None:
        if next(calls) % 3 < 2:
            raise KeyboardInterrupt
        waited(self)

    monkeypatch.setattr(slots.Slots, "wait_for_device", wait)
    for of in asked:
        made.add(of)
    done, interrupts = {}, 0
    for _ in range(100):  # a lost event would leave the engine busy for ever
        try:
            done |= {e.id: e for e in made.step() if isinstance(e, Completion)}
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts > 1
    assert [done[i].token_ids for i in range(4)] == [of.token_ids for of in plain]
