"""What is compiled, how often, and what the programs do with caches and weights."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import state as states
from jaxspec.decode_loop import decode_loop
from jaxspec.engine.engine import Engine, Request
from jaxspec.models.xla import COMPILER_OPTIONS, LOOP_OPTIONS
from jaxspec.options import Drafting, ProgramFeatures, Tree
from jaxspec.runtime.programs import Compiler, Programs, options_of_loops
from jaxspec.state import DecodeSpec
from jaxspec.weights.sharding import make_mesh
from tests import tiny
from tests.cases import NEW_TOKENS, case, engine_of, resampled, run, slow, target

pytestmark = pytest.mark.usefixtures("tight")

CHAIN: dict[str, Any] = dict(num_draft_tokens=4)
TREE: dict[str, Any] = dict(tree=Tree(2, 3), num_draft_tokens=4)
COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Collect what JAX itself reports to have compiled, whoever asked for it."""
    seen: list[str] = []

    def listen(event: str, duration: float, **kwargs: object) -> None:
        if event == COMPILED:
            seen.append(str(kwargs.get("fun_name", event)))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def test_the_loop_of_steps_has_its_own_options(monkeypatch):
    asked, jit = {}, jax.jit

    def spy(function: Any, **how: Any) -> Any:
        asked[function.__name__] = how.get("compiler_options")
        return jit(function, **how)

    monkeypatch.setattr(jax, "jit", spy)
    engine = case("31b").engine("mtp", grammars=True)
    run(engine, [Request(case("31b").prompts[0], 4)])
    assert asked.pop("decode_loop") == LOOP_OPTIONS != COMPILER_OPTIONS
    assert {name for name, options in asked.items() if options == COMPILER_OPTIONS} >= {"prefill"}
    assert LOOP_OPTIONS not in asked.values()
    assert options_of_loops(make_mesh(data=1, model=1)) is LOOP_OPTIONS
    # A loop that asks the host what grammars allow cannot be one model_def.
    engine.runtime.bind_decode(engine.runtime.init_state(1), None, 1, guided=True)
    assert asked["decode_loop"] == COMPILER_OPTIONS


def test_the_listener_hears_compilations(compilations):
    jax.jit(lambda x: x * 3 + len(compilations))(jnp.ones(7)).block_until_ready()
    assert compilations


@pytest.mark.parametrize("drafter", ["mtp", *slow(None, "dflash", "dflash tree")])
def test_values_compile_nothing(drafter, compilations):
    """Prompts, lengths in a bucket, limits, seeds, filters, stop ids and weights are all arguments."""
    c = case("31b")
    tree: dict[str, Any] = TREE if drafter == "dflash tree" else {}
    engine = c.engine("dflash" if tree else drafter, **tree)
    first = [Request(p, 4) for p in (c.prompts[0], c.prompts[1], c.prompts[2], c.prompts[4])]
    run(engine, first)
    known = engine.num_compilations
    assert known > 0
    compilations.clear()
    greedy = run(engine, first)
    variants = dict(
        prompts=[dataclasses.replace(r, prompt_ids=(*r.prompt_ids[::-1], 9)) for r in first[:2]]
        + [dataclasses.replace(r, prompt_ids=(30, 31, 32)) for r in first[2:]],
        limits=[dataclasses.replace(r, max_new_tokens=1 + i) for i, r in enumerate(first)],
        sampled=[resampled(r, temperature=0.8) for r in first],
        seeds=[resampled(dataclasses.replace(r, seed=5), temperature=0.8) for r in first],
        filters=[resampled(r, temperature=1.2, top_k=3, top_p=0.7) for r in first],
        mixed=[resampled(r, temperature=0.5 * (i % 2)) for i, r in enumerate(first)],
        stops=[dataclasses.replace(r, stop_ids=(3, 4, 5)[:i]) for i, r in enumerate(first)],
    )
    results = {name: run(engine, asked) for name, asked in variants.items()}
    assert all(r != greedy for name, r in results.items() if name != "stops")
    assert not compilations
    engine.target_params = tiny.random_params(engine.spec.target, seed=9)
    if drafter is not None:
        assert engine.spec.drafter is not None
        engine.drafter_params = tiny.random_params(engine.spec.drafter, seed=9)
    compilations.clear()  # drawing weights compiles, taking them must not
    assert run(engine, first) != greedy
    assert not compilations
    assert engine.num_compilations == known
    # The same shapes in another engine are the same programs.
    length = engine.cache_length
    run(engine_of(c.target, engine.drafter, batch_size=4, cache_length=length, **tree), first)
    assert not compilations


def test_what_is_new_comes_from_the_program_that_made_it(compilations):
    """A small program of its own once packed it: one more dispatch after each pass and each decode call."""
    c = case("31b")
    engine = Engine(c.target, None, batch_size=4, cache_length=48, programs=Programs())
    compilations.clear()  # of the weights
    run(engine, [Request(c.prompts[0], 4)])
    programs = sorted(key[0] for key in engine.runtime.used)
    assert programs == ["admit", "decode", "prefill"]
    state_maker = 1
    assert len(compilations) == len(programs) + state_maker, compilations


def test_a_program_that_another_thread_compiles_is_traced_once():
    """Warm-up traced and compiled in turns, and half of its two minutes was tracing."""
    traced, kept = [], Programs()

    def add(x):
        traced.append(x)
        return x + 1

    given: Any = dict(donate=None, mesh=make_mesh(devices=jax.devices()[:1]))
    compiler = Compiler()
    coming = kept.get(add, (jnp.ones(3),), **given, compiler=compiler)
    assert isinstance(coming, Future)
    assert kept.get(add, (jnp.ones(3),), **given, compiler=compiler) is coming
    compiler.close()
    program = kept.get(add, (jnp.ones(3),), **given)
    assert program is coming.result()
    assert program(jnp.ones(3)).tolist() == [2, 2, 2]
    assert len(traced) == 1


def programs(
    name: str, drafter: str | None, **options: Any
) -> dict[str, tuple[jax.stages.Compiled, list, int]]:
    """Return each program of an engine with its weights' and caches' shapes, and the caches' bytes.

    The cache length is a prime, so that no activation happens to have a cache's size.
    """
    c = case(name)
    engine = engine_of(
        c.target,
        None if drafter is None else c.drafter(drafter),
        batch_size=4,
        cache_length=61,
        **options,
    )
    run(engine, [Request(p, 4) for p in (c.prompts[0], c.prompts[1], c.prompts[2], c.prompts[4])])
    state = engine.runtime.init_state(4)
    caches = jax.tree.leaves((state.caches, state.drafter))
    weights = jax.tree.leaves((engine.target_params, engine.drafter_params))
    cache_bytes = sum(x.nbytes for x in caches)
    return {
        key[0]: (program, [*weights, *caches], cache_bytes)
        for key, program in engine.runtime.used.items()
    }


SIMPLE = re.compile(r"^\s+(?:ROOT )?\S+ = (\w+)\[([\d,]*)\]\S* ([\w-]+)\(")


def copied(text: str, arrays: list[jax.Array], where: str) -> list[str]:
    """Return the lines of a compiled program that copy or transpose one of `arrays`, by type and size.

    Args:
      where: "loop" for all computations but the entry, "all" for all. Small arrays are not looked for:
        norms and activations have their sizes.
    """
    names = {"float32": "f32", "int32": "s32", "bfloat16": "bf16"}
    sizes = {(names[str(x.dtype)], x.size) for x in arrays if x.size >= 1024}
    begin = text.index("\nENTRY")
    found = []
    for line in (text[:begin] if where == "loop" else text).splitlines():
        match = SIMPLE.match(line)
        if match and match[3] in ("copy", "transpose", "copy-start", "concatenate", "convert"):
            size = math.prod(int(n) for n in match[2].split(",") if n)
            if (match[1], size) in sizes:
                found.append(line.strip())
    return found


@pytest.mark.parametrize(
    ("name", "drafter", "shape"),
    [
        ("26b-a4b", "dflash", CHAIN),
        ("31b", "mtp", TREE),
        *(
            pytest.param(n, "dflash", CHAIN, marks=pytest.mark.slow)
            for n in ("e2b", "e4b", "12b", "31b")
        ),
        *(
            pytest.param(n, "dflash", TREE, marks=pytest.mark.slow)
            for n in ("e2b", "12b", "26b-a4b")
        ),
        *(pytest.param(n, "mtp", CHAIN, marks=pytest.mark.slow) for n in ("e2b", "12b", "26b-a4b")),
        *(pytest.param(n, "mtp", TREE, marks=pytest.mark.slow) for n in ("e2b", "26b-a4b")),
    ],
)
def test_caches_alias_and_nothing_large_is_copied_in_the_loop(name, drafter, shape):
    """In the compiled decode loop caches are updated in place, and weights are read where they are.

    Of the CPU's programs this is true as far as XLA's instructions go; what a matrix product packs for
    itself is not seen here.
    """
    for kind, (program, arrays, cache_bytes) in programs(name, drafter, **shape).items():
        text = program.as_text()
        memory = program.memory_analysis()
        assert memory is not None
        taken = 0 if kind in ("admit", "retire") else cache_bytes  # which take no caches
        assert memory.alias_size_in_bytes >= taken, kind
        assert "input_output_alias" in text.splitlines()[0], kind
        if kind == "decode":
            assert "while(" in text
            assert copied(text, arrays, "all") == []


def test_counts_alias_and_are_not_copied_in_the_loop():
    """So it is with what penalties, drawn drafts, block verification and logprobs add to the program."""
    loaded = target("31b")
    drafter = case("31b").drafter("dflash")
    spec = DecodeSpec(
        loaded.model_def,
        drafter.model_def,
        Drafting(4, draft_sampling=True, verification="block"),
        program_features=ProgramFeatures(
            penalties=True, num_biases=2, logprobs=True, top_logprobs=2
        ),
    )
    state = states.init_state(
        spec, 16, cache_length=61, num_stop_ids=4, cache_dtype=jnp.dtype("float32")
    )
    assert state.counts is not None
    loop = jax.jit(functools.partial(decode_loop, spec), donate_argnums=2)
    weights = loaded.params, drafter.params
    program = loop.lower(*weights, state, jnp.int32(3)).compile()
    memory, kept = program.memory_analysis(), (state.caches, state.drafter, state.counts)
    assert memory is not None
    assert memory.alias_size_in_bytes >= sum(x.nbytes for x in jax.tree.leaves(kept))
    arrays = [*jax.tree.leaves((state.caches, state.drafter)), state.counts.output]
    assert copied(program.as_text(), arrays, "all") == []


def test_a_plain_step_of_one_row_copies_no_cache():
    """XLA's CPU backend copied every cache three times a step: a scatter of one update is not one to it."""
    loaded = target("31b")
    spec = DecodeSpec(loaded.model_def, None)
    state = states.init_state(
        spec, 1, cache_length=61, num_stop_ids=1, cache_dtype=jnp.dtype("float32")
    )
    loop = jax.jit(functools.partial(decode_loop, spec), donate_argnums=2)
    program = loop.lower(loaded.params, None, state, jnp.int32(3)).compile()
    assert copied(program.as_text(), jax.tree.leaves(state.caches), "all") == []


def test_a_copied_weight_would_be_found():
    """The negative control: experts once contracted an axis between two that were kept."""
    weights = jnp.ones((8, 48, 64))

    def loop(x, w):
        return jax.lax.fori_loop(
            0, 3, lambda _, x: x + jnp.einsum("rd,edf->erf", x, w).sum((0, 2))[:, None], x
        )

    text = jax.jit(loop).lower(jnp.ones((5, 48)), weights).compile().as_text()
    assert copied(text, [weights], "loop")


def test_state_is_donated():
    """After a call the old caches are gone: nobody can keep two copies by accident."""
    c = case("31b")
    engine = c.engine("dflash")
    states = []
    decoding = engine.runtime.bind_decode

    def remember(state: Any, *limits: Any) -> Any:
        states.append(state)
        return decoding(state, *limits)

    engine.runtime.bind_decode = remember  # type: ignore[method-assign]
    run(engine, [Request(c.prompts[1], NEW_TOKENS)])
    caches = jax.tree.leaves([(s.caches, s.drafter) for s in states])
    assert caches
    assert all(x.is_deleted() for x in caches)


def test_params_survive():
    """Weights are not donated, and a run leaves them as they were."""
    params = target("31b").params
    before = {name: np.asarray(x).copy() for name, x in params.items()}
    run(case("31b").engine(None), [Request((5,), 2)])
    for name, x in params.items():
        np.testing.assert_array_equal(x, before[name])


def test_a_state_made_for_fewer_draft_tokens_is_refused():
    """Its rings would lose keys to rejected tokens, silently and only past the window."""
    c = case("31b")
    engine = c.engine("mtp", num_draft_tokens=3)
    state = engine.runtime.init_state(4)
    more = dataclasses.replace(engine.spec, drafting=Drafting(6))
    with pytest.raises(ValueError, match=r"num_draft_tokens is 6.*at most num_draft_tokens=3"):
        jax.eval_shape(
            functools.partial(decode_loop, more),
            engine.target_params,
            engine.drafter_params,
            state,
            jnp.int32(1),
        )
