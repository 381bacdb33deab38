"""What an engine is asked and what it answers; and which requests the programs of a spec can decode.

Read `Request`, then `Completion`. Nothing here runs anything.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jaxspec.options import SEEDS, VALUES, FieldError, Sampling, at_least, is_a, shown, whole
from jaxspec.runtime.runtime import NewRows, Runtime, cache_length_for
from jaxspec.state import NO_GUIDE, DecodeSpec

if TYPE_CHECKING:
    from jaxspec.text.grammars import Grammar

PRIORITIES = whole(-(2**31), 2**31 - 1)


def kept(returned: Any) -> int | None:
    """Return what a `stop_at` returned: how many tokens stay, or None.

    Raises:
      FieldError: it is neither.
    """
    if returned is None:
        return None
    if wrong := at_least(0).refusal(returned):
        raise FieldError("stop_at", f"returned a value that {wrong}, or None")
    return int(returned)


def _is_list(value: Any) -> bool:
    return hasattr(value, "__len__") and hasattr(value, "__iter__") and not isinstance(value, str)


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:  # also a tuple with a list in it
        return False
    return True


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "prompt_ids": (_is_list, "token ids"),
    "sampling": (lambda value: isinstance(value, Sampling), "a Sampling"),
    "stop_ids": (_is_list, "token ids, or ()"),
    "id": (_is_hashable, "hashable, such as a number or a text"),
    "stop_at": (lambda value: value is None or callable(value), "a function, or None"),
    "grammar": (
        lambda value: value is None or hasattr(value, "tokens"),
        "what GrammarTokens.compile returns, or None",
    ),
}
"""Fields of a request that are no numbers: what they must be, as a test and in words."""


def kind_refusal(name: str, value: Any) -> str | None:
    """Say why a value is not of the kind of this field of a request, or None where it is."""
    fits, words = _KINDS[name]
    return None if fits(value) else f"is {shown(value)}; it must be {words}"


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it.

    Attributes:
      prompt_ids: token ids, BOS included where the model wants one.
      stop_ids: generation ends with (and keeps) the first of these.
      seed: 0 to 2**32 - 1. With `sample`, it names the request's random draws; nothing else does.
      sample: which of the draws of that seed. None: 0, or the request's place in the list that `run` is given.
      id: what updates and the completion are called. None: a number that the engine chooses, or the place in
        the list that `run` is given.
      stop_at: called with the tokens so far whenever the loop returns to the host. A number n ends the
        row and keeps its first n tokens. For stop texts: `tokenizer.stop_at_text` makes one.
      priority: requests of a smaller number leave the engine's queue sooner; equal ones in their order.
      grammar: what the reply may be, from `grammars.GrammarTokens.compile`. It ends with one of the grammar's stop ids,
        beside those given here.

    Raises:
      FieldError: a field is of another kind than these. What values may be is asked by the engine.
    """

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    sample: int | None = None
    id: Hashable | None = None
    stop_at: Callable[[Sequence[int]], int | None] | None = None
    priority: int = 0
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for name in _KINDS:
            if wrong := kind_refusal(name, getattr(self, name)):
                raise FieldError(name, wrong)

    @property
    def num_stop_ids(self) -> int:
        """How many different stop ids it has."""
        return len(self.all_stop_ids)

    @property
    def all_stop_ids(self) -> set[int]:
        """What ends it, the ends of its grammar included."""
        return {*self.stop_ids, *(self.grammar.tokens.stop_ids if self.grammar else ())}


@dataclass(frozen=True)
class Update:
    """A request has more tokens; `token_ids` are all it has so far.

    `acceptance_lengths`, `verify_lengths` and log-probabilities are those of a `Completion`; the last of requests that
    ask for them.
    """

    id: Hashable
    token_ids: tuple[int, ...]
    acceptance_lengths: tuple[int, ...] = ()
    verify_lengths: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None
    sampled_logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None


Reason = Literal["stop", "length", "cancelled", "error"]
"""Why a request is done."""


@dataclass(frozen=True)
class Completion:
    """A request is done, or `error` says why it cannot be.

    Attributes:
      finish_reason: "stop": a stop id, or `Request.stop_at`. "length": the limit. "cancelled": `Engine.cancel`.
        "error": it was refused, and nothing was generated; or the target's logits were not finite somewhere,
        and `token_ids` are those before.
      acceptance_lengths: one number a verify step, the tokens it committed, bonus included, before any cut by a
        stop or the limit. Prefill's token belongs to no step. Empty after an error, so that no statistic
        counts them.
      verify_lengths: one number a verify step, the drafts that it verified.
      logprobs: one number a token, under the target as it is. None where the engine does not keep them.
      sampled_logprobs: the same under the distribution that was sampled from: after suppressed tokens,
        penalties, temperature and filters. 0 in greedy rows.
      top_logprobs: the target's best tokens in each one's place, as pairs of id and log-probability, best first.
      field: the field of the request that `error` is about, where it is the request's fault.
      cached_tokens: of the prompt, which were not read again, since an earlier prompt began with them.
    """

    id: Hashable
    token_ids: tuple[int, ...] = ()
    finish_reason: Reason = "length"
    acceptance_lengths: tuple[int, ...] = ()
    error: str | None = None
    logprobs: tuple[float, ...] | None = None
    sampled_logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    field: str | None = None
    cached_tokens: int = 0
    verify_lengths: tuple[int, ...] = ()


def refused(request: Request, error: FieldError) -> Completion:
    """Return the completion of a request that cannot run."""
    return Completion(request.id, finish_reason="error", error=str(error), field=error.field)


def callback_failed(
    request: Request, error: Exception, token_ids: tuple[int, ...], **logprobs: Any
) -> Completion:
    """Return the completion of a request whose `stop_at` raised an error."""
    said = f"stop_at raised {type(error).__name__}: {error}"
    return Completion(request.id, token_ids, "error", error=said, **logprobs)


def grammar_failed(
    request: Request, why: str, token_ids: tuple[int, ...], **logprobs: Any
) -> Completion:
    """Return the completion of a row whose grammar says nothing of what follows these tokens."""
    error = f"grammar: after {len(token_ids)} tokens {why}"
    return Completion(request.id, token_ids, "error", error=error, field="grammar", **logprobs)


def failed(request: Request, token_ids: tuple[int, ...], **logprobs: Any) -> Completion:
    """Return the completion of a row whose logits after these tokens were not sound."""
    error = (
        f"the target's logits at position {len(request.prompt_ids) + len(token_ids)} are not "
        "finite (NaN, "
        "+inf, or no token is possible): weights are damaged, a number overflowed, or biases, "
        "bans, "
        "logits_fn or a grammar leave no token"
    )
    return Completion(request.id, token_ids, "error", error=error, **logprobs)


def check_room(spec: DecodeSpec, cache_length: int) -> None:
    """Refuse caches of fewer positions than each request needs.

    Raises:
      FieldError: naming it.
    """
    least = cache_length_for(spec, 2)
    if cache_length < least:
        raise FieldError(
            "cache_length",
            lambda format_field: (
                f"{format_field('cache_length', cache_length)}: a prompt of one token with a new "
                "one takes "
                f"{least}, one step counted; pass more"
            ),
        )


def check_cache_length(spec: DecodeSpec, cache_length: int) -> None:
    """Refuse caches of more positions than any request can use.

    Raises:
      FieldError: naming it.
    """
    most = cache_length_for(spec, spec.target.config.max_positions)
    if cache_length > most:
        raise FieldError(
            "cache_length",
            lambda format_field: (
                f"{format_field('cache_length', cache_length)}: the target has "
                f"{spec.target.config.max_positions} "
                f"positions, and one step takes {spec.step_tokens} more; pass at most {most}"
            ),
        )


def positions(spec: DecodeSpec, request: Request) -> int:
    """Return the positions that a request needs in a cache."""
    return cache_length_for(spec, len(request.prompt_ids) + request.max_new_tokens)


def ids_refusal(ids: Iterable[Any], vocab_size: int) -> str | None:
    """Say which of some token ids are none of a vocabulary, or None where all are.

    A number that is not whole is refused, because to cut it would make another token of it.
    """
    is_plain = set(map(type, ids)) <= {int}  # nearly always, and quickly told of a long prompt
    if odd := [] if is_plain else [i for i in ids if not is_a("a whole number", i)]:
        return f"{shown(odd)} are not whole numbers; expected ids, as a tokenizer gives"
    if bad := [i for i in ids if not 0 <= i < vocab_size]:
        return f"{shown(bad)} are outside the vocabulary; expected 0 to {vocab_size - 1}"
    return None


def refusal(spec: DecodeSpec, request: Request) -> FieldError | None:
    """Say why programs of this spec cannot decode a request, whatever their shapes; None when they can."""
    config, sampling, program_features = spec.target.config, request.sampling, spec.program_features
    count, most, size = len(request.prompt_ids), request.max_new_tokens, config.vocab_size
    if count == 0:
        return FieldError("prompt_ids", lambda _: "the prompt is empty; give at least one token")
    for name, words, ids in (
        ("prompt_ids", "prompt ids", request.prompt_ids),
        ("stop_ids", "stop ids", request.stop_ids),
    ):
        if wrong := ids_refusal(ids, size):
            return FieldError(name, lambda _, words=words, wrong=wrong: f"{words} {wrong}")
    for name, allowed, value in (
        ("max_new_tokens", at_least(1), most),
        ("seed", SEEDS, request.seed),
        ("sample", SEEDS, request.sample or 0),
        ("priority", PRIORITIES, request.priority),
    ):
        if wrong := allowed.refusal(value):
            return FieldError(name, wrong)
    if sampling.penalties and not program_features.penalties:
        name = sampling.penalties[0]
        return FieldError(
            name, f"is {getattr(sampling, name):g}, but the engine was made without penalties=True"
        )
    for token in sampling.logit_bias:
        if not 0 <= token < size:
            return FieldError(
                "logit_bias", f"{token} is outside the vocabulary; expected 0 to {size - 1}"
            )
    if (biases := len(sampling.logit_bias)) > program_features.num_biases:
        return FieldError(
            "logit_bias",
            f"names {biases} tokens, but the engine was made for {program_features.num_biases}; "
            "pass "
            f"num_biases={biases}",
        )
    if sampling.logprobs and not program_features.logprobs:
        return FieldError("logprobs", "is on, but the engine was made without logprobs=True")
    if sampling.top_logprobs > program_features.top_logprobs:
        return FieldError(
            "top_logprobs",
            f"is {sampling.top_logprobs}, but the engine was made for "
            f"{program_features.top_logprobs}",
        )
    if (grammar := request.grammar) is not None:
        if not program_features.grammars:
            return FieldError("grammar", "was given, but the engine was made without grammars=True")
        if grammar.tokens.vocab_size != size:
            return FieldError(
                "grammar",
                f"was made for {grammar.tokens.vocab_size} tokens; the target has {size}: make it "
                "with "
                f"GrammarTokens(tokenizer, {size}, stop_ids)",
            )
    if count + most > config.max_positions:
        return FieldError(
            "max_new_tokens",
            lambda format_field: (
                f"prompt ({count} tokens) + {format_field('max_new_tokens')} ({most}) needs "
                f"{count + most} "
                f"positions; the model has {config.max_positions}"
            ),
        )
    return None


def sampling_values(spec: DecodeSpec, rows: Sequence[Sampling]) -> dict[str, np.ndarray]:
    """Return what rows ask of sampling as arrays, a row each, as `DecodeSpec.sampling` takes them."""
    values: dict[str, np.ndarray] = {
        name: np.asarray([getattr(r, name) for r in rows], np.float32) for name in VALUES
    }
    most = spec.target.config.vocab_size
    values["top_k"] = np.asarray([min(r.top_k, most) for r in rows], np.int32)
    ids = np.full((len(rows), spec.program_features.num_biases), -1, np.int32)
    biases = np.zeros(ids.shape, np.float32)
    for row, asked in enumerate(rows):
        count = len(asked.logit_bias)
        ids[row, :count] = list(asked.logit_bias)
        biases[row, :count] = list(asked.logit_bias.values())
    return dict(values, bias_ids=ids, bias_values=biases)


def admission(
    runtime: Runtime,
    new: Mapping[int, Request],
    guides: Mapping[int, int],
    *,
    rows: int,
    num_stop_ids: int,
) -> NewRows:
    """Return requests as the program takes them that gives them rows of a state.

    Args:
      new: by row.
      guides: the numbers of their guides, of those that have grammars.
      rows: of the state.
    """
    asked = [new.get(row, Request((), 0)) for row in range(rows)]
    stop_ids = np.full((rows, num_stop_ids), -1, np.int32)
    seeds = np.zeros((rows, 2), np.uint32)
    for row, request in new.items():
        unique = sorted(request.all_stop_ids)
        stop_ids[row, : len(unique)] = unique
        seeds[row] = request.seed, request.sample or 0
    return runtime.admission(
        [row if row in new else rows for row in range(rows)],
        [r.max_new_tokens for r in asked],
        stop_ids,
        sampling_values(runtime.spec, [r.sampling for r in asked]),
        seeds,
        [guides.get(row, NO_GUIDE) for row in range(rows)] if guides else None,
    )
