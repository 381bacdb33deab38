"""After `Engine.warm_up` nothing is compiled, in any mode: JAX itself is asked, which also tells of small programs."""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np
import pytest

import jaxspec
from jaxspec.commands.bench.trace import compilations
from jaxspec.engine.engine import Completion, Engine, Request
from jaxspec.options import Drafting, ProgramFeatures, Sampling, Tree
from jaxspec.runtime.programs import Compiler
from jaxspec.text import grammars
from tests.cases import case, request

pytestmark = pytest.mark.usefixtures("tight")


def live(engine: Engine, requests: list[Request]) -> list[Completion]:
    """Send requests while others run, cancel two of them, and forget all; then send some once more."""
    done: list[Completion] = []

    def step(times: int) -> None:
        for _ in range(times):
            done.extend(e for e in engine.step() if isinstance(e, Completion))

    for place, asked in enumerate(requests):
        engine.add(asked)
        step(place % 3)
    running = [r.id for r in requests if r.id not in {d.id for d in done}]
    for name in (running[0], running[-1]):
        engine.cancel(name)
    while not engine.is_idle:
        step(1)
    engine.reset()
    done += [e for e in engine.run(requests[:2]) if isinstance(e, Completion)]
    return done


def test_a_warm_engine_that_can_do_all_compiles_nothing() -> None:
    """Reading ahead, stored prefixes in two tiers, penalties, biases, log-probabilities, stops, cancelled requests."""
    c = case("31b")
    program_features = dict(penalties=True, num_biases=2, logprobs=True, top_logprobs=2)
    engine = c.engine(
        "dflash",
        batch_size=2,
        read_ahead=2,
        choose_length="never",
        max_prefill_tokens=32,
        steps_per_return=3,
        prefix_bytes=2**22,
        prefix_host_bytes=2**22,
        **program_features,
    )
    engine.warm_up()
    asked = [
        request(p, 4 + place, id=place, stop_ids=(1, 2)[: place % 3])
        if place % 2
        else request(
            p,
            6,
            id=place,
            temperature=0.9,
            top_p=0.9,
            frequency_penalty=0.5,
            logit_bias={3: 1.0},
            logprobs=True,
            top_logprobs=2,
            stop_at=lambda ids: 4 if len(ids) > 4 else None,
        )
        for place, p in enumerate((*c.prompts, *c.prompts[:3]))
    ]
    with compilations() as late:
        done = live(engine, asked)
    assert len(done) == len(asked) + 2
    assert {d.error for d in done} == {None}
    assert not late


# --- the bundled pair, one mode at a time ------------------------------------------------------------


@functools.cache
def bundled(drafter: str) -> Any:
    return jaxspec.load(drafter=drafter)


MODES: dict[str, tuple[str | None, dict[str, Any], dict[str, Any]]] = {
    "plain": (None, {}, {}),
    "dflash": ("dflash", dict(choose_length="never"), {}),
    "mtp": ("mtp", dict(choose_length="never"), {}),
    "tree": ("mtp", dict(drafting=Drafting(11, tree=Tree(3, 5))), {}),
    "drawn": (
        "dflash",
        dict(drafting=Drafting(draft_sampling=True, verification="block")),
        dict(temperature=0.9),
    ),
    "chosen": ("dflash", dict(choose_length="always"), {}),
    "read ahead": ("dflash", dict(read_ahead=2, choose_length="never"), {}),
    "prefixes": ("mtp", dict(prefix_bytes=2**27, prefix_host_bytes=2**27), {}),
    "invariant": ("dflash", dict(invariant=True), {}),
    "logprobs": (
        "dflash",
        dict(
            program_features=ProgramFeatures(logprobs=True, top_logprobs=3), choose_length="never"
        ),
        dict(logprobs=True, top_logprobs=2),
    ),
    "penalties": (
        "dflash",
        dict(program_features=ProgramFeatures(penalties=True, num_biases=2), choose_length="never"),
        dict(repetition_penalty=1.2, temperature=0.7, logit_bias={5: 1.0}),
    ),
    "grammars": (
        "dflash",
        dict(program_features=ProgramFeatures(grammars=True), choose_length="never"),
        {},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_warm_engine_compiles_nothing(mode: str) -> None:
    drafter, options, values = MODES[mode]
    pair = bundled(drafter or "dflash")
    models = (pair.target, pair.drafter if drafter else None)
    engine = Engine(*models, batch_size=4, cache_length=1024, **options)
    engine.warm_up()
    allowed: list[Any] = [None]
    if engine.spec.program_features.grammars:
        tokens = grammars.GrammarTokens.of_model(pair.target, pair.tokenizer)
        allowed.append(tokens.compile("regex", "[0-9]{3,9}"))
    rng, size = np.random.default_rng(0), pair.target.config.vocab_size
    common = rng.integers(5, size, 300).tolist()
    asked = []
    for place in range(10):
        prompt = rng.integers(5, size, int(rng.integers(1, 900))).tolist()
        prompt = common[:290] + prompt[:50] if place % 3 == 0 else prompt
        grammar = allowed[place % len(allowed)]
        sampling = Sampling(**values) if place % 2 else Sampling()
        asked.append(Request(tuple(prompt), 5 + 3 * place, sampling, id=place, grammar=grammar))
    with compilations() as late:
        done = live(engine, asked)
    assert len(done) == len(asked) + 2
    assert {d.error for d in done} == {None}
    assert not late


def test_nobody_waits_for_programs_that_are_compiled_aside() -> None:
    """A server that is stopped while it loads ends at once, however many programs were asked for."""
    compiler, go_on = Compiler(threads=1), threading.Event()
    first, second = compiler.submit(lambda: go_on.wait(60)), compiler.submit(lambda: 1 // 0)
    compiler.close()
    [thread] = [t for t in threading.enumerate() if t.name == "jaxspec-compiler"]
    assert thread.daemon
    assert not first.done()
    go_on.set()
    assert first.result(60)
    assert isinstance(second.exception(60), ZeroDivisionError)
    thread.join(60)


def test_several_programs_are_compiled_at_once() -> None:
    """An engine's seventeen programs took two minutes of one thread, on a host of sixteen cores."""
    compiler, together = Compiler(threads=3), threading.Barrier(3)
    programs = [compiler.submit(lambda: together.wait(60)) for _ in range(3)]
    threads = [t for t in threading.enumerate() if t.name == "jaxspec-compiler"]
    compiler.close()
    assert {program.result(60) for program in programs} == {0, 1, 2}
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_programs_are_compiled_before_caches_are_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, XLA times products on copies of their operands, and `cache_tokens="auto"` leaves no room for them."""
    c = case("31b")
    on_gpu = lambda mesh: False  # noqa: E731
    for module in ("jaxspec.engine.engine", "jaxspec.runtime.memory"):
        monkeypatch.setattr(f"{module}.on_cpu", on_gpu)
    engine = Engine(
        c.target,
        c.drafter("dflash"),
        batch_size=3,
        cache_length=128,
        cache_tokens="auto",
        read_ahead=0,
        choose_length="never",  # one loop of steps in place of one for each length
    )
    states = []
    compile_in_thread = Compiler.submit

    def submit(self: Compiler, compiling: Any) -> Any:
        states.append(engine._scheduler.slots._state)
        return compile_in_thread(self, compiling)

    monkeypatch.setattr(Compiler, "submit", submit)
    engine.add(request([2, 5, 7], 4))
    assert len(states) > 2
    assert set(states) == {None}
    assert not engine.runtime.programs.pending  # programs for shapes serve the state itself
    count = engine.num_compilations
    while not engine.is_idle:
        engine.step()
    assert engine.num_compilations == count
