"""What the tests here decode: the feature sets with few layers, their prompts and naive continuations.

Compiling takes nearly all of the time. Everything is therefore made once, and shapes repeat.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

from jaxspec import cache, state
from jaxspec.configs.base import GenerationDefaults, LayerType
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Completion, Request
from jaxspec.models.gemma4 import Gemma4
from jaxspec.options import Drafting, ProgramFeatures, Sampling
from jaxspec.runtime import prefill
from jaxspec.runtime.runtime import Programs
from jaxspec.weights.define import with_kv_dtype
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.model_def import ModelDef
from tests import fakes, tiny, tiny_qwen3

PROGRAMS = Programs()
SAMPLING = dataclasses.fields(Sampling)
BLOCK = 5
SLOTS = 4
NEW_TOKENS = 20
CACHE_LENGTH = 64
PROMPT_LENGTHS = (1, 5, 16, 37, 9, 17, 2, 30)  # the window is 8, a prefill chunk 16
_LAYERS: dict[str, tuple[LayerType, ...]] = {
    "e2b": ("sliding", "full", "sliding", "full"),
    "e4b": ("sliding", "full", "sliding", "full"),
    "12b": ("sliding", "full"),
    "26b-a4b": ("sliding", "full"),
    "31b": ("sliding", "sliding", "full"),
}


@contextlib.contextmanager
def sharing_passes(ring_multiple: int) -> Iterator[None]:
    """Let prompts, their chunks and decoding rows share passes of few tokens, as on a GPU.

    Args:
      ring_multiple: what sizes of rings are rounded up to.
    """
    passes: dict[str, Any] = dict(SHARED_WIDTHS=(4, 16), SHARED_PREFILL=16, MIDDLE_WIDTH=8)
    passes |= dict(PREFILL_CHUNK=16, full_pass=lambda *_: 64)
    with (
        mock.patch.multiple(prefill, **passes),
        mock.patch.object(cache, "RING_MULTIPLE", ring_multiple),
    ):
        state._empty_state.clear_cache()  # it has the rings of before
        try:
            yield
        finally:
            state._empty_state.clear_cache()


@dataclass(frozen=True)
class Case:
    """A target, prompts whose first tokens differ, and how naive greedy decoding continues them."""

    target: LoadedModel
    prompts: list[tuple[int, ...]]
    sequences: list[list[int]]  # prompt and more new tokens than a test asks for

    def continuation(self, row: int, count: int = NEW_TOKENS) -> tuple[int, ...]:
        begin = len(self.prompts[row])
        return tuple(self.sequences[row][begin : begin + count])

    def drafter(self, name: str) -> LoadedModel:
        """Return an "oracle", a "hostile" drafter, a "mixed" one that is wrong here and there, or a random one.

        The random ones are "dflash" and "mtp", with centroids where the released assistant has them.
        """
        if name == "dflash":
            return fakes.dflash(self.target, block_size=BLOCK)
        if name == "mtp":
            shares_kv = bool(self.target.config.num_kv_shared_layers)  # E2B and E4B
            return fakes.mtp(self.target, centroids=shares_kv)
        sequences = self.sequences
        if name == "mixed":  # never the first token, by which the sequences are told apart
            rng = np.random.default_rng(0)
            sequences = [
                s[:1] + [(t + 1) % tiny.VOCAB_SIZE if rng.random() < 0.2 else t for t in s[1:]]
                for s in sequences
            ]
        shift = 1 if name == "hostile" else 0
        return fakes.lookup(self.target, sequences, block_size=BLOCK, shift=shift)

    def engine(
        self,
        drafter: str | None,
        *,
        batch_size: int = SLOTS,
        cache_length: int = CACHE_LENGTH,
        **options: Any,
    ) -> Engine:
        return engine_of(
            self.target,
            None if drafter is None else self.drafter(drafter),
            batch_size=batch_size,
            cache_length=cache_length,
            **options,
        )


@functools.cache
def target(name: str) -> LoadedModel:
    """Return a feature set in float32 with random weights, in few layers.

    "31b fp8" has an fp8 K/V cache.
    """
    name, _, kv_dtype = name.partition(" ")
    if name in tiny_qwen3.FEATURE_SETS:
        return fakes.loaded(*tiny_qwen3.target(name))
    config = tiny.config(name)
    layers = _LAYERS[name]
    config = dataclasses.replace(
        config,
        layer_types=layers,
        num_kv_shared_layers=2 if config.num_kv_shared_layers else 0,
        max_positions=1024,
    )
    model_def = with_kv_dtype(ModelDef(Gemma4, config, "float32"), kv_dtype or None)
    suppress = tiny.SUPPRESS_TOKENS.get(name, ())
    params = tiny.random_params(model_def, seed=0)
    if suppress:  # unless suppressed they win
        table = np.array(params["embedder.table"])
        table[np.asarray(suppress)] *= 4
        params["embedder.table"] = jax.device_put(table)
    return fakes.loaded(model_def, params, GenerationDefaults(suppress_tokens=suppress))


@functools.cache
def case(name: str) -> Case:
    """Return the case of a feature set; no choice in it is a near-tie, so tokens can be compared."""
    rng = np.random.default_rng(1)
    prompts = [
        (20 + i, *rng.integers(20, tiny.VOCAB_SIZE, n - 1).tolist())
        for i, n in enumerate(PROMPT_LENGTHS)
    ]
    # The oracle must know a block beyond the last token that is returned.
    naive = fakes.naive_greedy(target(name), prompts, NEW_TOKENS + BLOCK)
    assert naive.smallest_gap > 1e-4, (
        f"choose another seed: {name} has a gap of {naive.smallest_gap}"
    )
    return Case(target(name), prompts, naive.sequences)


def run(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    """Return the completions in the order of the requests."""
    return completions(engine.run(requests), len(requests))


def completions(events: Iterable[object], count: int) -> list[Completion]:
    done = {e.id: e for e in events if isinstance(e, Completion)}
    assert done.keys() == set(range(count))
    return [done[i] for i in range(count)]


def engine_of(target: LoadedModel, drafter: LoadedModel | None, **options: Any) -> Engine:
    """Return an engine that shares its programs with the others of a test file."""
    return Engine(target, drafter, programs=PROGRAMS, **by_record(**options))


def request(prompt_ids: Sequence[int], max_new_tokens: int, **options: Any) -> Request:
    """Return a request; what `Sampling` knows goes there."""
    values = {f.name: options.pop(f.name) for f in SAMPLING if f.name in options}
    return Request(tuple(prompt_ids), max_new_tokens, Sampling(**values), **options)


def resampled(request: Request, **values: Any) -> Request:
    """Return the same request with other values of sampling."""
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, **values))


def by_record(**options: Any) -> dict[str, Any]:
    """Sort options into the records that they belong to; what is in no record stays an option."""
    found: dict[str, Any] = {}
    for name, record in (("drafting", Drafting), ("program_features", ProgramFeatures)):
        of = {f.name for f in dataclasses.fields(record)} & options.keys()
        found[name] = record(**{option: options.pop(option) for option in of})
    return options | found


def until_stop(tokens: Sequence[int], stop_ids: Sequence[int]) -> tuple[int, ...]:
    """Cut after the first stop id."""
    for i, token in enumerate(tokens):
        if token in stop_ids:
            return tuple(tokens[: i + 1])
    return tuple(tokens)


def slow(*values: object) -> list[Any]:
    """Return parameters that only the slow suite takes."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


# What one drafter has shown for all five feature sets, others show for three; the slow suite tries all.
# e4b has the parts of e2b, and 12b those of 31b.
SOME_FEATURE_SETS = ["e2b", "26b-a4b", "31b", *slow("e4b", "12b")]
