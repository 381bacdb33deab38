"""Which passes read prompts: every token once and in order, few shapes, and rows that decode between them."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from jaxspec import cache
from jaxspec.commands.bench import trace
from jaxspec.engine.engine import Completion, Engine, Request, Update
from jaxspec.registry import presets
from jaxspec.runtime import memory, prefill
from jaxspec.runtime.prefill import PrefillPlanner, Shapes, chunks
from jaxspec.state import DecodeSpec
from jaxspec.weights.define import model_def_of
from tests.cases import NEW_TOKENS, case

pytestmark = pytest.mark.usefixtures("tight")

NAME = "31b"


def mesh_of(platform: str, data: int = 1, model: int = 1) -> Mesh:
    """Return what `Shapes` asks of a mesh."""
    devices = np.array([mock.Mock(platform=platform)] * data * model)
    return mock.Mock(spec=Mesh, devices=devices, shape={"data": data, "model": model})


@pytest.fixture(autouse=True)
def chunks_as_shipped(tight: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", 512)


@pytest.mark.parametrize(("preset", "tokens"), [("26b-a4b", 1215), ("31b", 184), ("e4b", 184)])
def test_what_reading_the_weights_costs(preset: str, tokens: int) -> None:
    """A mixture of experts reads all experts and computes with few of them."""
    model_def = model_def_of(presets()[preset], "bfloat16")
    assert round(prefill.balance_tokens(model_def)) == tokens


def test_a_shared_pass_has_no_more_tokens_than_rows_may_wait_for() -> None:
    gpu, cpu = mesh_of("gpu"), mesh_of("cpu")
    found = [prefill.full_pass(gpu, most) for most in (None, 5000, 2048, 2047, 700, 100)]
    assert found == [2048, 2048, 2048, 1024, 512, 256]
    assert prefill.full_pass(cpu, None) == prefill.SHARED_PREFILL
    # A mixture of experts reads its weights in the time of many tokens.
    assert [prefill.full_pass(gpu, most, 1215.0) for most in (None, 4095)] == [4096, 2048]
    assert prefill.full_pass(cpu, None, 1215.0) == prefill.SHARED_PREFILL


@pytest.mark.parametrize(
    ("preset", "model", "tokens"),
    [("26b-a4b", 1, 4096), ("31b", 1, 1024), ("31b", 2, 2048), ("12b", 1, 2048), ("e4b", 1, 2048)],
)
def test_rows_do_not_wait_for_much_arithmetic(preset: str, model: int, tokens: int) -> None:
    """Rows of 31B paused for 0.275 s: a pass over 2,048 tokens takes 0.2 s, and a step follows it."""
    model_def = model_def_of(presets()[preset], "bfloat16")
    mesh = mesh_of("gpu", model=model)
    assert Shapes.of(model_def, 32, mesh, invariant=False).full == tokens


def test_slots_are_those_that_were_asked_for() -> None:
    """48 became 64 without a word."""
    asked = (1, 3, 12, 16, 17, 44, 48, 100)
    on_gpu, on_cpu = ([prefill.slots_on(mesh_of(p), n) for n in asked] for p in ("gpu", "cpu"))
    assert on_gpu == [*asked]
    assert on_cpu == [1, 3, 12, 16, 24, 48, 48, 104]
    shapes = Shapes(12, mesh_of("gpu"), full=2048, longest=8192, balance=184.0)
    assert max(rows for rows, _ in shapes.all()) == 12
    assert {width for _, width in shapes.all(60)} == {64}
    assert {width for _, width in shapes.all(300)} == {64, 128, 256, 512}
    alone = dataclasses.replace(shapes, slots=1)
    assert alone.of_prompts([12, 12, 300]) == [(1, 16), (1, 512)]


def test_rows_do_not_depend_on_their_neighbours_in_an_odd_number_of_slots() -> None:
    c = case(NAME)
    made = c.engine("mixed", batch_size=3, invariant=True)
    assert made.batch_size == 3
    for order in ((0, 1, 2, 3, 4), (4, 2, 3, 0, 1), (2,)):
        asked = [Request(c.prompts[row], NEW_TOKENS, id=row) for row in order]
        for event in made.run(asked):
            if isinstance(event, Completion):
                assert event.token_ids == c.continuation(int(str(event.id)))


lengths = st.lists(st.integers(1, 300) | st.integers(1, 5000), min_size=1, max_size=12)


@settings(max_examples=30, deadline=None)
@given(
    lengths=lengths,
    slots=st.sampled_from([1, 3, 4, 32, 48]),
    full=st.sampled_from([256, 512, 2048]),
)
def test_every_token_is_read_once_and_in_order(lengths: list[int], slots: int, full: int) -> None:
    shapes = Shapes(slots, mesh_of("gpu"), full=full, longest=8192, balance=1215.0)
    prompts = {slot: np.arange(length) for slot, length in enumerate(lengths[:slots])}
    read = dict.fromkeys(prompts, 0)
    known = set(shapes.of_prompts([len(prompt) for prompt in prompts.values()]))
    assert known <= set(shapes.all(max(len(prompt) for prompt in prompts.values())))
    for chunk in chunks(prompts, shapes):
        assert chunk.tokens.shape in known
        rows = zip(
            *map(np.asarray, (chunk.slots, chunk.tokens, chunk.start, chunk.count)), strict=True
        )
        for row, (slot, tokens, start, count) in enumerate(rows):
            if slot == slots:
                assert count == 0
                continue
            assert start == read[slot]
            np.testing.assert_array_equal(tokens[:count], np.arange(start, start + count))
            read[slot] += count
            assert chunk.is_last[row] == (read[slot] == len(prompts[slot]))
    assert read == {slot: len(prompt) for slot, prompt in prompts.items()}


@settings(max_examples=30, deadline=None)
@given(
    lengths=lengths,
    slots=st.sampled_from([3, 4, 32, 48]),
    full=st.sampled_from([512, 2048]),
    ring=st.sampled_from([64, 576, 1088, 10_000]),
    parts=st.sampled_from([1, 2]),
)
def test_chunks_of_a_prompt_share_a_pass_up_to_a_ring(
    lengths: list[int], slots: int, full: int, ring: int, parts: int
) -> None:
    """Every token is read once, and no token of a pass is written over another."""
    slots *= parts
    mesh = mesh_of("gpu", parts)
    shapes = Shapes(slots, mesh, full=full, longest=8192, balance=1215.0, ring=ring)
    prompts = {slot: np.arange(length) for slot, length in enumerate(lengths[:slots])}
    read = dict.fromkeys(prompts, 0)
    known = set(shapes.of_prompts([len(prompt) for prompt in prompts.values()]))
    for chunk in chunks(prompts, shapes):
        assert chunk.tokens.shape in known
        rows = zip(
            *map(np.asarray, (chunk.slots, chunk.tokens, chunk.start, chunk.count)), strict=True
        )
        of_slots: dict[int, list[int]] = {}
        for row, (slot, tokens, start, count) in enumerate(rows):
            if not count:
                continue
            slot += slots // parts * (row // (len(chunk.slots) // parts))
            assert start == read[slot]
            np.testing.assert_array_equal(tokens[:count], np.arange(start, start + count))
            read[slot] += count
            of_slots.setdefault(slot, []).append(start + count)
            assert chunk.is_last[row] == (read[slot] == len(prompts[slot]))
        for ends in of_slots.values():
            assert len(ends) == 1 or (ends[-1] <= ring and chunk.tokens.shape[1] == 64)
    assert read == {slot: len(prompt) for slot, prompt in prompts.items()}


@settings(max_examples=15, deadline=None)
@given(lengths=lengths)
def test_small_passes_follow_from_a_prompts_own_length(lengths: list[int]) -> None:
    """What `invariant` promises: the same shapes in the same places, whoever waits."""
    shapes = Shapes(64, mesh_of("gpu"), full=prefill.SHARED_PREFILL, longest=8192, balance=1215.0)

    def passes_of(prompts: dict[int, np.ndarray]) -> dict[int, list[tuple[Any, ...]]]:
        found: dict[int, list[tuple[Any, ...]]] = {slot: [] for slot in prompts}
        for chunk in chunks(prompts, shapes):
            for slot, start in zip(chunk.slots.tolist(), chunk.start.tolist(), strict=True):
                if slot < 64:
                    found[slot].append((*chunk.tokens.shape, start))
        return found

    prompts = {slot: np.zeros(length, int) for slot, length in enumerate(lengths)}
    together = passes_of(prompts)
    alone = {slot: passes_of({slot: prompt})[slot] for slot, prompt in prompts.items()}
    assert together == alone


def test_prompts_that_wait_together_share_a_pass() -> None:
    """Of 26B-A4B: six prompts in one pass, where each by itself would take half as long as all."""
    shapes = Shapes(32, mesh_of("gpu"), full=2048, longest=8192, balance=1215.0)
    waiting = {slot: np.zeros(length, int) for slot, length in enumerate((300, 400, 60, 200))}
    assert [chunk.tokens.shape for chunk in chunks(waiting, shapes)] == [(4, 512)]
    alone = [chunk.tokens.shape for chunk in chunks({0: waiting[0]}, shapes)]
    assert alone == [(1, 512)]
    long = [chunk.tokens.shape for chunk in chunks({0: np.zeros(5000, int)}, shapes)]
    assert long == [(1, 2048), (1, 2048), (1, 2048)]


def test_passes_deep_in_a_prompt_are_narrow() -> None:
    """Rows of 26B-A4B paused for 0.35 seconds while passes over 4,096 tokens read a prompt of 131,000."""
    planner = PrefillPlanner(Shapes(32, mesh_of("gpu"), full=4096, longest=8192, balance=1215.0))
    planner.narrow_from = 8192
    planner.add({0: np.zeros(20_000, int), 1: np.zeros(9000, int)})
    begins, widths = [], []
    while planner.pending:
        begins.append(max(begin for _, begin in planner.pending.values()))
        chunk, _ = planner.next_chunk()
        widths.append(chunk.tokens.shape[1])
    assert begins[:3] == [0, 4096, 8192]
    assert widths[:2] == [4096, 4096]
    assert max(widths[2:]) == 512


@pytest.mark.parametrize(("full", "slots", "most_padding"), [(2048, 32, 0.15), (512, 8, 0.12)])
def test_little_of_the_passes_over_a_stream_is_padding(
    full: int, slots: int, most_padding: float
) -> None:
    """Rows are refilled as prompts end, as an engine that reads ahead does."""
    shapes = Shapes(slots, mesh_of("gpu"), full=full, longest=8192, balance=1215.0)
    coming = [job.prompt_tokens for job in trace.generate(192, 7, None, 4096)]
    left: dict[int, int] = {}
    read = computed = number = 0
    while coming or left:
        while coming and len(left) < slots:
            left[number], number = coming.pop(0), number + 1
        rows, width, taken = shapes.next_pass(left)
        computed += rows * width
        for slot, count in taken.items():
            read += count
            left[slot] -= count
            if not left[slot]:
                del left[slot]
    assert read == 64_153
    assert computed - read < most_padding * computed


def test_chunks_of_a_deep_prompt_fill_no_pass() -> None:
    """Of a model without rings all chunks of a prompt may share a pass. Rows would wait for it."""
    ring = np.iinfo(np.int32).max
    shapes = Shapes(32, mesh_of("gpu"), full=2048, longest=8192, balance=184.0, ring=ring)
    deep, begins = {0: 30_000}, {0: 100_000}
    assert shapes.next_pass(deep, narrow=True, begins=begins) == (1, 512, {0: 512})
    shared = shapes.next_pass(deep | {1: 40}, narrow=True, begins=begins | {1: 0})
    assert max(shared[2].values()) <= 512


def test_decoding_stops_for_as_many_prompts_as_fill_a_pass() -> None:
    shapes = Shapes(64, mesh_of("gpu"), full=2048, longest=8192, balance=1215.0)
    assert shapes.min_free_slots([]) == 0
    assert shapes.min_free_slots([100]) == 1
    assert shapes.min_free_slots([300] * 20) == 4
    assert shapes.min_free_slots([20] * 20) == 8  # never more than an eighth of the slots
    few = Shapes(8, mesh_of("gpu"), full=2048, longest=8192, balance=1215.0)
    assert few.min_free_slots([300] * 20) == 1


def test_each_part_of_a_mesh_has_the_passes_of_one_device() -> None:
    """And a prompt is read in the part of its slot. With prompts in one part the rows of others are empty."""
    one, two = (
        Shapes(n * 16, mesh_of("gpu", n), full=2048, longest=8192, balance=1215.0) for n in (1, 2)
    )
    lengths = {slot: 100 + 30 * slot for slot in range(16)}
    rows, width, taken = one.next_pass(lengths)
    both = lengths | {16 + slot: left for slot, left in lengths.items()}
    of_both = taken | {16 + slot: count for slot, count in taken.items()}
    assert two.next_pass(both) == (2 * rows, width, of_both)
    assert two.next_pass({16 + slot: left for slot, left in lengths.items()})[:2] == (
        2 * rows,
        width,
    )
    assert two.full_tokens == 2 * one.full_tokens
    limits = (None, 4096, 4095, 100)
    assert [prefill.full_pass(two.mesh, n) for n in limits] == [2048, 2048, 1024, 256]
    assert prefill.default_read_ahead(32, two.mesh) == 32
    assert prefill.default_read_ahead(200, two.mesh) == 2 * prefill.default_read_ahead(
        100, one.mesh
    )
    assert prefill.ahead_on(two.mesh, 3) == 4
    chunk = prefill.make_chunk({5: (range(9), 2), 17: (range(30, 34), 0)}, 4, 8, 32, parts=2)
    assert np.asarray(chunk.slots).tolist() == [5, 32, 1, 32]  # 17 is the second one of its part
    assert np.asarray(chunk.count).tolist() == [7, 0, 4, 0]
    assert np.asarray(chunk.tokens)[[0, 2], 0].tolist() == [2, 30]


@pytest.mark.parametrize(
    ("name", "drafter", "multiple"),
    [
        ("31b", "dflash", 1),
        ("31b", "dflash", 64),
        ("e4b", "mtp", 64),
        pytest.param("26b-a4b", "mtp", 64, marks=pytest.mark.slow),
        pytest.param("31b", None, 64, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_the_same_where_chunks_of_a_prompt_share_a_pass(
    share_passes: Callable[[int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    drafter: str | None,
    multiple: int,
) -> None:
    """With rings that have no slot to spare, and with some, in pages. So are the tokens of each step."""
    shared, c = share_passes(multiple), case(name)

    def completions() -> dict[Any, Completion]:
        made = c.engine(drafter, batch_size=16, cache_length=194, cache_tokens=640)
        asked = [Request(p, NEW_TOKENS, id=i) for i, p in enumerate(c.prompts)]
        return {e.id: e for e in made.run(asked) if isinstance(e, Completion)}

    packed = completions()
    assert sum(shared) > 4
    for row, completion in packed.items():
        assert completion.token_ids == c.continuation(row)
    with monkeypatch.context() as patch:
        patch.setattr(Shapes, "with_rings", lambda shapes, *_: shapes)
        shared.clear()
        alone = completions()
    assert not shared
    for row, completion in packed.items():
        assert completion.acceptance_lengths == alone[row].acceptance_lengths


@settings(max_examples=60, deadline=None)
@given(
    lengths=lengths,
    begun=st.lists(st.integers(0, 600), min_size=12, max_size=12),
    ring=st.sampled_from([576, 1088, 10_000]),
    full=st.sampled_from([512, 2048, 4096]),
)
def test_passes_that_decoding_rows_share_take_prompts_in_order(
    lengths: list[int], begun: list[int], ring: int, full: int
) -> None:
    """No pass is nearly empty while there is more to read, and none takes a prompt that goes beyond a ring."""
    shapes = Shapes(32, mesh_of("gpu"), full=full, longest=8192, balance=1215.0, ring=ring)
    left = dict(enumerate(lengths))
    begins = dict(enumerate(begun[: len(lengths)]))
    found = shapes.next_mixed(left, begins)
    is_long = [begins[slot] + left[slot] > ring for slot in left]
    if is_long[0]:
        assert found is None
        return
    assert found is not None
    left = dict(itertools.islice(left.items(), [*is_long, True].index(True)))
    rows, width, taken = found
    assert (rows, width) in shapes.mixed_passes
    used = sum(-(-count // 64) for count in taken.values())
    assert used <= rows
    assert list(taken) == list(left)[: len(taken)]
    assert all(taken[slot] == left[slot] for slot in list(taken)[:-1])
    assert taken == left or used == rows
    assert rows == 512 // 64 or 2 * used >= rows


def test_passes_that_no_decoding_rows_share() -> None:
    """Rows are split, nothing is known of rings, or a dense model's arithmetic binds from 184 tokens on."""
    shapes = Shapes(32, mesh_of("gpu"), full=2048, longest=8192, balance=1215.0, ring=1088)
    assert shapes.mixed_passes == [(8, 64), (32, 64)]
    assert dataclasses.replace(shapes, full=512).mixed_passes == [(8, 64)]
    for other in (dict(ring=0), dict(mesh=mesh_of("gpu", 2)), dict(balance=184.0)):
        assert dataclasses.replace(shapes, **other).next_mixed({0: 10}, {0: 0}) is None


@pytest.mark.parametrize(("preset", "decoding"), [("26b-a4b", 32), ("31b", 0)])
@pytest.mark.parametrize(("data", "invariant"), [(1, False), (2, False), (1, True)])
def test_memory_counts_rows_that_decode_in_passes_over_prompts(
    preset: str, decoding: int, data: int, invariant: bool
) -> None:
    spec = DecodeSpec(model_def_of(presets()[preset], "bfloat16"), None)
    shapes = Shapes.of(spec.target, 32, mesh_of("gpu", data), invariant=invariant)
    most = shapes.most_tokens(4096)
    more = decoding if data == 1 and not invariant else 0
    assert memory.largest_pass(spec, shapes, 32, 4096) == most + more


def test_only_drafters_that_say_so_get_chunks_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that carries a state from chunk to chunk would begin each with that before the pass."""
    monkeypatch.setattr(prefill, "SHARED_WIDTHS", (4, 16))
    monkeypatch.setattr(prefill, "full_pass", lambda *_: 512)
    monkeypatch.setattr(cache, "RING_MULTIPLE", 64)
    rings = {
        drafter: case("31b").engine(drafter, batch_size=4, cache_length=210).runtime.shapes.ring
        for drafter in ("dflash", "mixed", None)
    }
    assert rings["dflash"] > 0
    assert rings[None] > 0
    assert rings["mixed"] == 0


# --- turns -------------------------------------------------------------------------------------------


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Make an engine that reads one pass of 16 tokens, and then lets the others decode."""
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", 16)
    return case(NAME).engine("mixed", batch_size=2, steps_per_return=1, max_prefill_tokens=1)


def test_a_long_prompt_lets_others_decode_between_its_chunks(engine: Engine) -> None:
    c = case(NAME)
    long = max(c.prompts, key=len)
    assert len(long) > 32  # three chunks or more
    first = engine.add(Request(c.prompts[0], NEW_TOKENS))
    engine.step()
    late = engine.add(Request(long, 3))
    told: list[list[Any]] = []
    done: dict[Any, Completion] = {}
    while not engine.is_idle:
        events = engine.step()
        told.append([e.id for e in events if isinstance(e, Update)])
        done |= {e.id: e for e in events if isinstance(e, Completion)}
    began = next(i for i, ids in enumerate(told) if late in ids)
    assert sum(first in ids for ids in told[:began]) >= 2
    assert done[first].token_ids == c.continuation(0)
    assert done[late].token_ids == c.continuation(c.prompts.index(long), 3)


def test_rows_that_decode_wait_for_no_more_tokens_than_they_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four rows of 16 tokens make a pass: two passes are within the bound, and three are not."""
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", 16)
    c = case(NAME)
    long = max(c.prompts, key=len)
    bounded = c.engine("mixed", batch_size=4, steps_per_return=1, max_prefill_tokens=130)
    read: list[int] = [0]
    feeding, decoding = bounded.runtime.bind_prefill, bounded.runtime.bind_decode

    def feed(state: Any, chunk: Any, *rest: Any) -> Any:
        read[-1] += chunk.tokens.size
        return feeding(state, chunk, *rest)

    def decode(*given: Any) -> Any:
        read.append(0)
        return decoding(*given)

    monkeypatch.setattr(bounded.runtime, "bind_prefill", feed)
    monkeypatch.setattr(bounded.runtime, "bind_decode", decode)
    bounded.add(Request(c.prompts[0], NEW_TOKENS))
    bounded.step()
    for _ in range(3):
        bounded.add(Request(long, 3))
    while not bounded.is_idle:
        bounded.step()
    assert max(read[1:]) == 128


def test_a_prompt_that_is_cancelled_while_it_is_read_leaves_nothing(engine: Engine) -> None:
    c = case(NAME)
    long = max(c.prompts, key=len)
    first = engine.add(Request(c.prompts[0], NEW_TOKENS))
    engine.step()
    late = engine.add(Request(long, 3))
    engine.step()  # one chunk of it
    engine.cancel(late)
    after = engine.add(Request(c.prompts[1], 4))
    done: dict[Any, Completion] = {}
    while not engine.is_idle:
        done |= {e.id: e for e in engine.step() if isinstance(e, Completion)}
    assert (done[late].finish_reason, done[late].token_ids) == ("cancelled", ())
    assert done[first].token_ids == c.continuation(0)
    assert done[after].token_ids == c.continuation(1, 4)


@pytest.mark.slow  # `test_warm_up` has an engine that can do all
def test_a_warm_engine_compiles_nothing(engine: Engine) -> None:
    engine.warm_up()
    known = engine.num_compilations
    for prompt in case(NAME).prompts:
        engine.add(Request(prompt, 3, stop_at=lambda ids: 1))
    with pytest.raises(ValueError, match="warm_up needs an idle engine"):
        engine.warm_up()
    done = 0
    while not engine.is_idle:
        done += sum(isinstance(e, Completion) for e in engine.step())
    assert done == len(case(NAME).prompts)
    assert engine.num_compilations == known


def test_whole_numbers_of_numpy_have_buckets_too() -> None:
    """They come out of every array, and lack `bit_length`. The types that tests check refuse them earlier."""
    script = """
import numpy as np
from jaxspec.runtime import prefill, runtime
from jaxspec.weights.sharding import make_mesh
mesh = make_mesh()
for n in (1, 5, 300, 2049):
    assert prefill.bucket(np.int64(n)) == prefill.bucket(n)
    assert runtime.cache_bucket(np.int64(n)) == runtime.cache_bucket(n)
    whole, plain = (prefill.full_pass(mesh, x) for x in (np.int64(n), n))
    assert whole == plain
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
