"""Requests to an engine, its replies, and the check of a request.

Read `Request`, then `Completion`, then `check_request`. Nothing here runs anything.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from jaxspec.configs.gemma4_vision import IMAGE_TOKENS, Gemma4VisionConfig
from jaxspec.options import SEEDS, FieldError, Sampling, at_least, is_a, shown, whole
from jaxspec.runtime.runtime import cache_length_for
from jaxspec.state import DecodeSpec
from jaxspec.text.images import ImagePatches

if TYPE_CHECKING:
    from jaxspec.text.grammars import Grammar

PRIORITIES = whole(-(2**31), 2**31 - 1)


def num_kept_tokens(returned: Any) -> int | None:
    """Return the value of a `stop_at` as a number of tokens to keep, or None to go on.

    Raises:
      FieldError: the value is neither.
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
    "images": (
        lambda value: _is_list(value) and all(isinstance(x, ImagePatches) for x in value),
        "a list of what jaxspec.text.images.patches_of returns, or ()",
    ),
}
"""Tests of the fields of a request that are no numbers, and what they must be in words."""


def kind_refusal(name: str, value: Any) -> str | None:
    """Return why a value is not of the kind of this field of a request, or None if it is."""
    fits, words = _KINDS[name]
    return None if fits(value) else f"is {shown(value)}; it must be {words}"


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it.

    Attributes:
      prompt_ids: token ids, BOS included where the model wants one.
      stop_ids: generation ends with (and keeps) the first of these.
      seed: 0 to 2**32 - 1. The random draws follow from `seed` and `sample` alone.
      sample: number of the sample of that seed. None: 0, or the request's index in a list for
        `run`.
      id: name of the request in updates and the completion. None: a number that the engine chooses,
        or the request's index in a list for `run`.
      stop_at: called with the tokens so far whenever the loop returns to the host. A number n ends
        the row and keeps its first n tokens. `tokenizer.stop_at_text` makes one for stop texts.
      priority: requests of a smaller number leave the engine's queue sooner; equal ones in their
        order.
      grammar: the form of the reply, from `GrammarTokens.compile`. One of the grammar's stop ids
        ends the reply, or one of `stop_ids`.
      images: in the order of their tokens. In `prompt_ids` stand as many placeholders for each as
        it has tokens.

    Raises:
      FieldError: a field is of another kind than these. The engine checks the values.
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
    images: tuple[ImagePatches, ...] = ()

    def __post_init__(self) -> None:
        for name in _KINDS:
            if wrong := kind_refusal(name, getattr(self, name)):
                raise FieldError(name, wrong)

    @property
    def num_stop_ids(self) -> int:
        """Number of its different stop ids."""
        return len(self.all_stop_ids)

    def image_spans(self, placeholder: int) -> list[tuple[int, int]]:
        """Return the begin and the end of the tokens of each image, which `check_request` accepted."""
        places = np.flatnonzero(np.asarray(self.prompt_ids) == placeholder)
        starts = np.cumsum([0, *(image.num_tokens for image in self.images)])[:-1]
        begins = places[starts].tolist()
        return [(b, b + x.num_tokens) for b, x in zip(begins, self.images, strict=True)]

    @property
    def all_stop_ids(self) -> set[int]:
        """Its stop ids and those of its grammar."""
        return {*self.stop_ids, *(self.grammar.tokens.stop_ids if self.grammar else ())}


class RequestLimits(NamedTuple):
    """Limits of an engine that a request must not exceed.

    Attributes:
      cache_length: positions of a slot.
      num_stop_ids: most stop ids of a request.
    """

    spec: DecodeSpec
    cache_length: int
    num_stop_ids: int


@dataclass(frozen=True)
class CheckedRequest(Request):
    """A request that `check_request` accepts for these limits. `Engine.validate` makes it."""

    limits: RequestLimits | None = field(default=None, repr=False, compare=False)


def with_identity(request: Request, id: Hashable, sample: int | None) -> Request:
    """Return a request with this id and this sample number, where it has none of its own."""
    id = id if request.id is None else request.id
    sample = sample if request.sample is None else request.sample
    return replace(request, id=id, sample=sample)


@dataclass(frozen=True)
class Update:
    """All tokens of a request so far, sent when it has more of them.

    `acceptance_lengths`, `verify_lengths` and log-probabilities are those of a `Completion`.
    Log-probabilities are None unless the request asks for them.
    """

    id: Hashable
    token_ids: tuple[int, ...]
    acceptance_lengths: tuple[int, ...] = ()
    verify_lengths: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None
    sampled_logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None


Reason = Literal["stop", "length", "cancelled", "error"]
"""Reason for the end of a request."""


@dataclass(frozen=True)
class Completion:
    """The end of a request.

    Attributes:
      finish_reason: "stop": a stop id, or `Request.stop_at`. "length": the limit. "cancelled":
        `Engine.cancel`. "error": the request was refused, and nothing was generated; or the
        target's logits were not finite at some position, and `token_ids` are the tokens before it.
      acceptance_lengths: tokens that each verify step committed, bonus included, before any cut by
        a stop or the limit. Prefill's token belongs to no step. Empty after an error, so that no
        statistic counts them.
      verify_lengths: drafts that each verify step verified.
      logprobs: log-probability of each token under the target. None if the engine does not keep
        them.
      sampled_logprobs: the same under the distribution that was sampled from: after suppressed
        tokens, penalties, temperature and filters. 0 in greedy rows.
      top_logprobs: for each token, the target's best tokens at its position, as pairs of id and
        log-probability, best first.
      field: the field of the request that caused `error`, if one did.
      cached_tokens: prompt tokens that came from the prefix cache.
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
    message = f"stop_at raised {type(error).__name__}: {error}"
    return Completion(request.id, token_ids, "error", error=message, **logprobs)


def grammar_failed(
    request: Request, reason: str, token_ids: tuple[int, ...], **logprobs: Any
) -> Completion:
    """Return the completion of a row whose grammar failed after these tokens."""
    error = f"grammar: after {len(token_ids)} tokens {reason}"
    return Completion(request.id, token_ids, "error", error=error, field="grammar", **logprobs)


def failed(request: Request, token_ids: tuple[int, ...], **logprobs: Any) -> Completion:
    """Return the completion of a row whose logits after these tokens were not finite."""
    error = (
        f"the target's logits at position {len(request.prompt_ids) + len(token_ids)} are not "
        "finite (NaN, "
        "+inf, or no token is possible): weights are damaged, a number overflowed, or biases, "
        "bans, "
        "logits_fn or a grammar leave no token"
    )
    return Completion(request.id, token_ids, "error", error=error, **logprobs)


def check_min_cache_length(spec: DecodeSpec, cache_length: int) -> None:
    """Refuse caches of fewer positions than any request needs.

    Raises:
      FieldError: `cache_length` is too small.
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


def check_max_cache_length(spec: DecodeSpec, cache_length: int) -> None:
    """Refuse caches of more positions than any request can use.

    Raises:
      FieldError: `cache_length` is too large.
    """
    limit = cache_length_for(spec, spec.target.config.max_positions)
    if cache_length > limit:
        raise FieldError(
            "cache_length",
            lambda format_field: (
                f"{format_field('cache_length', cache_length)}: the target has "
                f"{spec.target.config.max_positions} "
                f"positions, and one step takes {spec.step_tokens} more; pass at most {limit}"
            ),
        )


def num_positions(spec: DecodeSpec, request: Request) -> int:
    """Return the cache positions that a request needs."""
    return cache_length_for(spec, len(request.prompt_ids) + request.max_new_tokens)


def ids_refusal(ids: Iterable[Any], vocab_size: int) -> str | None:
    """Return which ids do not belong to a vocabulary, or None if all do.

    Numbers that are not whole are refused. Rounding would make another token of them.
    """
    all_ints = set(map(type, ids)) <= {int}  # the usual case, and quick for a long prompt
    if odd := [] if all_ints else [i for i in ids if not is_a("a whole number", i)]:
        return f"{shown(odd)} are not whole numbers; expected ids, as a tokenizer gives"
    if bad := [i for i in ids if not 0 <= i < vocab_size]:
        return f"{shown(bad)} are outside the vocabulary; expected 0 to {vocab_size - 1}"
    return None


def check_request(limits: RequestLimits, request: Request) -> FieldError | None:
    """Return why an engine with these limits cannot decode a request, or None if it can."""
    spec, cache_length, num_stop_ids = limits
    if error := check_for_spec(spec, request):
        return error
    needed = num_positions(spec, request)
    if needed > cache_length:
        return FieldError(
            "cache_length",
            lambda format_field: (
                f"cache holds {cache_length} positions, but prompt ({len(request.prompt_ids)} tokens) "
                f"+ {format_field('max_new_tokens')} ({request.max_new_tokens}) + one step "
                f"({spec.step_tokens}) needs {needed}; pass {format_field('cache_length', needed)}"
            ),
        )
    if request.num_stop_ids > num_stop_ids:
        return FieldError(
            "stop_ids",
            f"names {request.num_stop_ids} tokens, but the engine was made for {num_stop_ids}; "
            f"pass num_stop_ids={request.num_stop_ids}",
        )
    return None


def images_refusal(vision: Gemma4VisionConfig | None, request: Request) -> str | None:
    """Return why a target cannot read the images of a request, or None if it can.

    Args:
      vision: the config of its vision part, if it has one.
    """
    if vision is None:
        return (
            "were given, and the target reads text alone: its checkpoint has no vision part, or it "
            "was loaded without one (text only)"
        )
    for number, image in enumerate(request.images, 1):
        count, width = image.num_tokens, 3 * vision.patch_size**2
        shapes = (count * vision.pool_size**2, width), (count * vision.pool_size**2, 2)
        if (image.pixels.shape, image.positions.shape) != shapes:
            return (
                f"have patches {image.pixels.shape} and positions {image.positions.shape} in image "
                f"{number} of {count} tokens; this target reads {shapes[0]} and {shapes[1]}: make "
                "them with its config"
            )
        if not 0 < count <= IMAGE_TOKENS[-1]:
            return f"have {count} tokens in image {number}; expected 1 to {IMAGE_TOKENS[-1]}"
    places = np.flatnonzero(np.asarray(request.prompt_ids) == vision.image_token_id)
    total = sum(image.num_tokens for image in request.images)
    if len(places) != total:
        return (
            f"have {total} tokens, and the prompt has {len(places)} placeholders "
            f"({vision.image_token_id}) for them; expected as many"
        )
    spans = request.image_spans(vision.image_token_id)
    for number, (begin, end) in enumerate(spans, 1):
        if any(request.prompt_ids[i] != vision.image_token_id for i in range(begin, end)):
            return f"have other tokens of the prompt between those of image {number}"
    return None


def check_for_spec(spec: DecodeSpec, request: Request) -> FieldError | None:
    """Return why no program of this spec can decode a request, or None if some can."""
    config, sampling = spec.target.config, request.sampling
    count, new, size = len(request.prompt_ids), request.max_new_tokens, config.vocab_size
    if count == 0:
        return FieldError("prompt_ids", lambda _: "the prompt is empty; give at least one token")
    for name, words, ids in (
        ("prompt_ids", "prompt ids", request.prompt_ids),
        ("stop_ids", "stop ids", request.stop_ids),
    ):
        if wrong := ids_refusal(ids, size):
            return FieldError(name, lambda _, words=words, wrong=wrong: f"{words} {wrong}")
    for name, allowed, value in (
        ("max_new_tokens", at_least(1), new),
        ("seed", SEEDS, request.seed),
        ("sample", SEEDS, request.sample or 0),
        ("priority", PRIORITIES, request.priority),
    ):
        if wrong := allowed.refusal(value):
            return FieldError(name, wrong)
    for token in sampling.logit_bias:
        if not 0 <= token < size:
            return FieldError(
                "logit_bias", f"{token} is outside the vocabulary; expected 0 to {size - 1}"
            )
    vision = None if spec.vision is None else spec.vision.config
    if request.images and (wrong := images_refusal(vision, request)):
        return FieldError("images", wrong)
    grammar = request.grammar
    if error := spec.program_features.refusal(
        sampling, owner="engine", grammar=grammar is not None
    ):
        return error
    if grammar is not None and grammar.tokens.vocab_size != size:
        return FieldError(
            "grammar",
            f"was made for {grammar.tokens.vocab_size} tokens; the target has {size}: make it with "
            f"GrammarTokens(tokenizer, {size}, stop_ids)",
        )
    if count + new > config.max_positions:
        return FieldError(
            "max_new_tokens",
            lambda format_field: (
                f"prompt ({count} tokens) + {format_field('max_new_tokens')} ({new}) needs "
                f"{count + new} positions; the model has {config.max_positions}"
            ),
        )
    return None
