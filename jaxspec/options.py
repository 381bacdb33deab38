"""Options: of sampling by one request, of drafting by one run, of compiled programs.

`Sampling` and `Drafting` are data. Each field has its range and its help text here, once. Python
callers pass the records on, and the command line makes its options from the fields
(`commands.options`). `ProgramFeatures` lists the optional features of compiled programs.

A value out of range is a `FieldError`. It carries the field, so that Python shows
`num_draft_tokens` and the command line `--num-draft-tokens` in the same sentence. Nothing here
needs JAX, so refusing costs no start-up.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import reprlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeVar, cast

RecordT = TypeVar("RecordT")

Verification = Literal["standard", "block"]

ChooseLength = Literal["exact", "always", "survival", "never"]
"""The cases in which an engine chooses the number of drafts that a step verifies.

    exact    while all running rows are greedy, in float32: no choice changes their tokens
    always   in bfloat16 and with sampled rows too: rows keep the target's distribution, greedy ones
             except at near-ties, but their text depends on the choices, and so on the machine's
             speed
    survival as always, and each step chooses anew, by how sure the drafter is of its drafts: see
             `jaxspec.drafters.survival`
    never    all drafts are verified
"""
CHOOSE_LENGTH_HELP = (
    "Verify as many drafts a step as is quickest, down to none: where that changes no text, which "
    "is for greedy rows "
    "in float32; always, so that a text may depend on the machine's speed; survival, where each "
    "step chooses too, by how sure the drafter is; or never."
)


FormatField = Callable[..., str]
"""Formats a field in a message, alone or with the value to give it: `in_python` is one."""


def in_python(field: str, value: object = None) -> str:
    """Name a field as Python callers do: `num_draft_tokens`, or `num_draft_tokens=7`."""
    if value is None:
        return field
    return f'{field}="{value}"' if isinstance(value, str) else f"{field}={value!r}"


class FieldError(ValueError):
    """A value that cannot be used.

    Attributes:
      field: the field that is wrong.
    """

    def __init__(self, field: str, message: str | Callable[[FormatField], str]):
        """Make an error about `field`.

        Args:
          message: a text that follows the field's name, or a function that returns the whole text.
        """
        self.field, self._message = field, message
        super().__init__(self.format_message(in_python))

    def format_message(self, format_field: FormatField) -> str:
        """Return the message with its fields formatted by a function such as `in_python`."""
        if callable(self._message):
            return self._message(format_field)
        return f"{format_field(self.field)} {self._message}"

    @property
    def say(self) -> Callable[[FormatField], str]:
        """The former name of `format_message`."""
        warnings.warn("FieldError.say is now format_message", DeprecationWarning, stacklevel=2)
        return self.format_message


Kind = Literal["a number", "a whole number", "true or false", "a word"]


@dataclass(frozen=True)
class Range:
    """The values that a field may have.

    Attributes:
      words: what they are, as in "must be ...".
      allows: tells of a number, or of each number of an array; never true of nan.
      low, high: the smallest and the largest whole number, if the field is one and has limits. All
        whole numbers are below 2**31 otherwise.
      kind: the type of the values. Texts are not read as numbers, and numbers are not rounded.
    """

    words: str
    allows: Callable[[Any], Any]
    low: int | None = None
    high: int | None = None
    kind: Kind = "a number"

    @property
    def end(self) -> int | None:
        """The number that whole numbers without a limit of their own stay below."""
        return 2**31 if self.kind == "a whole number" and self.high is None else None

    def refusal(self, value: Any) -> str | None:
        """Say what is wrong with a value, or None when it is allowed."""
        if not is_a(self.kind, value):
            more = f", {self.words}" if self.words != self.kind else ""
            return f"is {_REPR.repr(value)}; it must be {self.kind}{more}"
        if self.end is not None and value >= self.end:
            return f"is {shown(value)}; it must be {self.words}, and below 2**31"
        return None if self.allows(value) else f"is {shown(value)}; it must be {self.words}"


def is_a(kind: Kind, value: Any) -> bool:
    """Return whether a value is of a kind. Scalars of numpy and JAX are numbers; booleans are not."""
    if kind == "a word":
        return isinstance(value, str)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if kind == "true or false" or isinstance(value, bool):
        return kind == "true or false" and isinstance(value, bool)
    if kind == "a whole number":
        return isinstance(value, numbers.Integral)
    if isinstance(value, int):
        return abs(value) <= sys.float_info.max
    return isinstance(value, numbers.Real)


def shown(value: Any) -> str:
    """Show a value in a message, in few characters."""
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        return f"{value:g}"
    return _REPR.repr(value)


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60
_REPR.maxlevel = 3


def at_least(low: int, off: str = "") -> Range:
    """Return the range of whole numbers from `low` on; `off` says what the least one means."""
    more = f"; {low}: {off}" if off else ""
    return Range(f"{low} or more{more}", lambda x: x >= low, low, kind="a whole number")


def whole(low: int, high: int) -> Range:
    """Return the range of whole numbers from `low` to `high`."""
    words = f"from {low} to {high:,}"
    return Range(words, lambda x: (x >= low) & (x <= high), low, high, "a whole number")


SEEDS = whole(0, 2**32 - 1)
"""Seeds of random draws have 32 bits. A larger seed is refused: it would equal a smaller one."""

LIMIT = 1e6
"""The limit of numbers that change logits, far beyond any use. Near float32's end, NaN appears."""

BIAS = Range("1e6 at most, or -inf to ban", lambda x: x <= LIMIT)


REQUIRED = dataclasses.MISSING
"""The default of a field that has none."""


CacheTokens = int | Literal["auto"] | None
"""Tokens for which caches have pages: a number, or as many as memory holds. None: whole rows."""
CACHE_TOKENS_HELP = (
    "Tokens for which caches have room, in pages of 64 that requests share: short requests leave "
    "room for more. auto: as many as fit in memory."
)


def parse_cache_tokens(text: str | None) -> CacheTokens:
    """Return the value of an option `cache_tokens`.

    Raises:
      FieldError: it is neither a whole number above 0 nor "auto".
    """
    if text is None or text == "auto":
        return text
    if not text.isdecimal() or not int(text):
        raise FieldError("cache_tokens", f"is {text!r}; give a number of tokens, or auto")
    return int(text)


def option(
    default: Any,
    help: str,
    *,
    range: Range | None = None,
    metavar: str | None = None,
    flag: str | None = None,
    needs: tuple[str, ...] = (),
    secret: bool = False,
    instead: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Declare a field of a record.

    Args:
      default: `REQUIRED` for none.
      help: the effect, in the words of the command line; shown by `--help`.
      range: the values that it, or each of several, may have; None: any value of its type.
      metavar: the placeholder of its value in `--help`.
      flag: the option on the command line, if that is not `--` and the field's name.
      needs: fields that must be set with it.
      secret: whether to hide it when the record is printed.
      instead: what to do instead of giving it values that other programs take.
    """
    metadata = dict(
        help=help, range=range, metavar=metavar, flag=flag, needs=needs, instead=instead
    )
    if isinstance(default, dict):
        return field(default_factory=dict, hash=False, metadata=metadata)
    return field(default=default, repr=not secret, metadata=metadata)


def check_ranges(record: Any) -> None:
    """Refuse a record with a number out of its range.

    Raises:
      FieldError: naming the first such field.
    """
    for name, wrong in out_of_range(record):
        raise FieldError(name, wrong)


def as_record(kind: type[RecordT], field: str, value: Any) -> RecordT:
    """Return a record of options, made of a mapping of its fields if it is one.

    Raises:
      FieldError: it is neither, or names a field that there is not.
    """
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise FieldError(field, f"is {shown(value)}; it must be a {kind.__name__}")
    known = [f.name for f in dataclasses.fields(cast(Any, kind))]
    for name in value:
        if name not in known:
            raise FieldError(field, f"has no field {name!r}{near_names(name, known)}")
    return kind(**value)


def near_names(name: object, known: Iterable[str]) -> str:
    """Return the end of a message about a name that is not known: those that are like it."""
    usual = {"max_tokens": "max_new_tokens", "n": "num_samples", "stop": "stop_texts"}
    near = difflib.get_close_matches(str(name), known := [*known], 2, 0.6)
    if usual.get(str(name)) in known:
        near = [usual[str(name)]]
    return f"; did you mean {' or '.join(near)}?" if near else f"; known are {', '.join(known)}"


def out_of_range(record: Any) -> Iterator[tuple[str, str]]:
    """Yield the fields of a record that are out of their ranges, each with what is wrong.

    None is allowed where it is the default. Of a tuple every entry has to be in range.
    """
    for f in dataclasses.fields(record):
        allowed: Range | None = f.metadata.get("range")
        value = getattr(record, f.name)
        if allowed is None or (value is None and f.default is None):
            continue
        for entry in value if isinstance(value, tuple) else (value,):
            if wrong := allowed.refusal(entry):
                yield f.name, wrong
                break


@dataclass(frozen=True)
class Sampling:
    """The sampling options of one request. The default is greedy."""

    temperature: float = option(
        0.0,
        "Divide logits by this before sampling; 0 is greedy.",
        range=Range("from 0 to 1e6; 0: greedy", lambda x: (x >= 0) & (x <= LIMIT)),
    )
    top_k: int = option(0, "Sample among the k likeliest tokens; 0: off.", range=at_least(0, "off"))
    top_p: float = option(
        1.0,
        "Sample among the likeliest tokens of this total probability; 1: off.",
        range=Range("in (0, 1]; 1: off", lambda x: (x > 0) & (x <= 1)),
    )
    min_p: float = option(
        0.0,
        "Sample among tokens at least this likely, relative to the likeliest; 0: off.",
        range=Range("in [0, 1]; 0: off", lambda x: (x >= 0) & (x <= 1)),
    )
    repetition_penalty: float = option(
        1.0,
        "Divide the positive logits of tokens of prompt and output by this, and multiply the "
        "negative "
        "ones; 1: off.",
        range=Range("from 1e-6 to 1e6; 1: off", lambda x: (x >= 1 / LIMIT) & (x <= LIMIT)),
    )
    presence_penalty: float = option(
        0.0,
        "Subtract this from the logits of tokens that are in the output.",
        range=Range("from -1e6 to 1e6; 0: off", lambda x: abs(x) <= LIMIT),
    )
    frequency_penalty: float = option(
        0.0,
        "Subtract this from the logit of a token for each time that it is in the output.",
        range=Range("from -1e6 to 1e6; 0: off", lambda x: abs(x) <= LIMIT),
    )
    logit_bias: Mapping[int, float] = option(
        {},
        'Add this to the logit of a token: 17=-2.5, repeatable, or {"17": -2.5, "4": 1}. -inf bans.',
        metavar="ID=VALUE|JSON",
    )
    logprobs: bool = option(
        False,
        "Keep the log-probability of every token, under the target as it is and under what was "
        "sampled "
        "from.",
    )
    top_logprobs: int = option(
        0,
        "Also keep those of the target's N best tokens in the place of each.",
        range=at_least(0),
        metavar="N",
    )

    def __post_init__(self) -> None:
        """Refuse values out of range.

        Raises:
          FieldError: naming the first one.
        """
        check_ranges(self)
        for token, bias in self.logit_bias.items():
            if not is_a("a whole number", token):
                raise FieldError("logit_bias", f"has the id {token!r}; expected whole numbers")
            if wrong := BIAS.refusal(bias):
                raise FieldError("logit_bias", f"of {token} {wrong}")

    @property
    def penalties(self) -> tuple[str, ...]:
        """Name the penalties that are not off."""
        return tuple(name for name in PENALTIES if getattr(self, name) != DEFAULTS[name])


PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
VALUES = ("temperature", "top_k", "top_p", "min_p", *PENALTIES)
"""The fields of `Sampling` that are one number a row."""

RANGES: dict[str, Range] = {f.name: f.metadata["range"] for f in dataclasses.fields(Sampling)}
DEFAULTS: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(Sampling)}


@dataclass(frozen=True)
class Tree:
    """A draft tree's shape: each level adds the `topk` best children of its `topk` best nodes."""

    topk: int = option(
        REQUIRED,
        "Draft a tree: each level widens its best nodes, this many, by as many tokens. Needs its "
        "depth and the number of draft tokens, the nodes to verify: 3, 5 and 11, say.",
        range=at_least(1),
    )
    depth: int = option(REQUIRED, "Levels of that tree.", range=at_least(1))


@dataclass(frozen=True)
class Drafting:
    """The options of a run for drafting, and for accepting drafts."""

    num_draft_tokens: int | None = option(
        None,
        "Tokens drafted a step; the newest token, which they follow, never counts. Default: the "
        "drafter's own number.",
        range=at_least(1),
    )
    tree: Tree | None = option(
        None,
        "Draft a tree of this shape instead of a chain.",
        needs=("num_draft_tokens",),
    )
    draft_sampling: bool = option(
        False,
        "When sampling, let the drafter draw its tokens too, instead of proposing its best.",
    )
    verification: Verification = option(
        "standard",
        "When sampling, judge drafts one by one (standard), or a block at a time, which accepts "
        "more "
        "(block).",
    )
    synthetic_acceptance: float | None = option(
        None,
        "For benchmarks: commit this many tokens a step on average, whatever the target thinks of "
        "the "
        "drafts. Only the decision is replaced: all work is done. The text is meaningless.",
        range=Range("1 or more", lambda x: (x >= 1) & (x < math.inf)),
        metavar="TAU",
    )

    def __post_init__(self) -> None:
        """Refuse values out of range, and options that exclude each other.

        Raises:
          FieldError: naming the field.
        """
        check_ranges(self)
        if self.verification not in ("standard", "block"):
            raise FieldError(
                "verification", f'is {self.verification!r}; it is "standard" or "block"'
            )
        if self.synthetic_acceptance is not None and self.tree is not None:
            raise FieldError("synthetic_acceptance", "is for chains; leave the tree out")
        for name, shown in self.changes_acceptance:
            if self.tree is not None:
                raise FieldError(
                    name,
                    lambda format_field, shown=shown: (
                        f"{format_field(*shown)} is for chains, and a tree follows the target's "
                        "own choices; leave "
                        "one out"
                    ),
                )
            if self.synthetic_acceptance is not None:
                raise FieldError(
                    name,
                    lambda format_field, shown=shown: (
                        f"{format_field(*shown)} changes how drafts are accepted, which "
                        f"{format_field('synthetic_acceptance')} decides by chance; leave one out"
                    ),
                )

    @property
    def changes_acceptance(self) -> list[tuple[str, tuple[Any, ...]]]:
        """List the options that change acceptance: the field, and the arguments to format it."""
        on: list[tuple[str, tuple[Any, ...]]] = []
        if self.draft_sampling:
            on.append(("draft_sampling", ("draft_sampling",)))
        if self.verification == "block":
            on.append(("verification", ("verification", "block")))
        return on


@dataclass(frozen=True)
class ProgramFeatures:
    """Optional features of compiled programs. Each costs time in every step, used or not.

    Attributes:
      penalties: rows may have repetition, presence and frequency penalties.
      num_biases: the most tokens of a row's `logit_bias`.
      logprobs: the log-probability of every emitted token is kept.
      top_logprobs: so many of the target's best tokens beside each are kept too.
      logits_fn: a `state.LogitsFn` that changes logits; another function is another program.
      grammars: rows may have grammars. In steps of rows that have none this costs nothing.
    """

    penalties: bool = False
    num_biases: int = 0
    logprobs: bool = False
    top_logprobs: int = 0
    logits_fn: Callable[..., Any] | None = None
    grammars: bool = False

    def __post_init__(self) -> None:
        """Refuse values out of range, and features that need another.

        Raises:
          FieldError: naming the field.
        """
        for name in ("num_biases", "top_logprobs"):
            if getattr(self, name) < 0:
                raise FieldError(name, f"is {getattr(self, name)}; it must be 0 or more")
        if self.top_logprobs and not self.logprobs:
            raise FieldError(
                "top_logprobs",
                lambda format_field: (
                    f"{format_field('top_logprobs')} is {self.top_logprobs}, but "
                    f"{format_field('logprobs')} are off"
                ),
            )

    @classmethod
    def wanted_by(cls, requests: Iterable[Sampling], **fields: Any) -> ProgramFeatures:
        """Return the features that all of these need; `fields` are set besides."""
        samplings = list(requests)
        top = max((s.top_logprobs for s in samplings), default=0)
        biases = max((len(s.logit_bias) for s in samplings), default=0)
        needed: dict[str, Any] = dict(
            penalties=any(s.penalties for s in samplings),
            num_biases=1 << (biases - 1).bit_length() if biases else 0,  # few sizes, few programs
            logprobs=top > 0 or any(s.logprobs for s in samplings),
            top_logprobs=top,
        )
        return cls(**(needed | fields))

    def refusal(
        self, sampling: Sampling, *, owner: str, grammar: bool = False
    ) -> FieldError | None:
        """Return why programs with these features cannot decode a request, or None if they can.

        Args:
          owner: of the programs, such as "engine".
          grammar: whether the request has a grammar.
        """
        if sampling.penalties and not self.penalties:
            name = sampling.penalties[0]
            return FieldError(
                name,
                f"is {getattr(sampling, name):g}, but the {owner} was made without penalties=True",
            )
        if (biases := len(sampling.logit_bias)) > self.num_biases:
            return FieldError(
                "logit_bias",
                f"names {biases} tokens, but the {owner} was made for {self.num_biases}; "
                f"pass num_biases={biases}",
            )
        if sampling.logprobs and not self.logprobs:
            return FieldError("logprobs", f"is on, but the {owner} was made without logprobs=True")
        if sampling.top_logprobs > self.top_logprobs:
            return FieldError(
                "top_logprobs",
                f"is {sampling.top_logprobs}, but the {owner} was made for {self.top_logprobs}",
            )
        if grammar and not self.grammars:
            return FieldError(
                "grammar", f"was given, but the {owner} was made without grammars=True"
            )
        return None
