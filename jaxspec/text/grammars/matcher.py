"""Follow a grammar token by token on the host, by llguidance.

There are three steps, in the order of their cost:

* `GrammarTokens` reads a tokenizer: seconds for a large vocabulary, once a model.
* `GrammarTokens.compile` reads a grammar: milliseconds, once a grammar.
* `Grammar.matcher` begins a reply: microseconds, once a request.

A mask is packed: bit i % 32 of word i // 32 is 1 if token i may come next.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt32

from jaxspec.configs.base import GenerationDefaults
from jaxspec.options import FieldError, shown
from jaxspec.text.grammars.schemas import without_annotations
from jaxspec.text.strict_json import strict_json
from jaxspec.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

Kind = Literal["json_schema", "json_object", "regex", "lark"]
"""The language of a grammar. `json_object` is any JSON object, and has no source."""

Mask = UInt32[np.ndarray, "positions words"]

ALL = np.uint32(0xFFFFFFFF)
# Without a bound, a model that likes spaces may write nothing else until its limit.
_WHITESPACE = r"[ \n\t]{0,40}"
_MAX_SOURCE = 1_000_000


@runtime_checkable
class Target(Protocol):
    """The properties of a `LoadedModel` that `GrammarTokens.of_model` reads."""

    @property
    def config(self) -> Any:
        """Return the config, with its `vocab_size`."""

    @property
    def generation(self) -> GenerationDefaults | None:
        """Return the checkpoint's defaults, with its end-of-sequence ids."""


class GrammarTokens:
    """A tokenizer and a vocabulary, in the form that grammars need."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: Sequence[int]):
        """Read a tokenizer.

        Args:
          vocab_size: the number of the model's logits. Ids that the tokenizer does not know are
            never allowed.
          stop_ids: the ids that end a reply. They are allowed where the grammar may end.

        Raises:
          FieldError: llguidance is not installed, the model has fewer tokens than its tokenizer, or
            there are no stop ids.
        """
        llguidance = _llguidance()
        known = tokenizer.backend.get_vocab_size()
        if vocab_size < known:
            raise FieldError("vocab_size", f"is {vocab_size}; the tokenizer has {known} tokens")
        if not stop_ids:
            raise FieldError("stop_ids", "is empty; a grammar needs a token that ends the reply")
        self.vocab_size = vocab_size
        self.stop_ids = frozenset(stop_ids)
        self.tokens = llguidance.LLTokenizer(
            tokenizer.backend.to_str(), n_vocab=vocab_size, eos_token=list(stop_ids)
        )

    @classmethod
    def of_model(cls, target: Target, tokenizer: Tokenizer) -> GrammarTokens:
        """Read a tokenizer for a target, whose own end-of-sequence ids end a reply.

        Raises:
          FieldError: as of `GrammarTokens`.
        """
        ends = target.generation.eos_token_ids if target.generation else ()
        return cls(tokenizer, target.config.vocab_size, ends)

    @property
    def words(self) -> int:
        """The number of words of a mask."""
        return -(-self.vocab_size // 32)

    def compile(
        self, kind: Kind, source: Any = None, *, frame: str | None = None, lenient: bool = False
    ) -> Grammar:
        """Read a grammar.

        Args:
          source: the source as it came in a request: a JSON schema, as text or values; a regular
            expression of the whole reply, in the syntax of Rust's regex crate; or a Lark grammar.
          frame: a Lark grammar of the whole reply, in which `@body` stands for `source`. None: the
            whole reply is `source`.
          lenient: whether to ignore keywords of a schema that are not supported.

        Raises:
          FieldError: the grammar is wrong, or has a keyword that is not supported. The field is the
            kind.
        """
        llguidance = _llguidance()
        text = self._translated(kind, source, lenient)
        if frame is not None:
            body = {"lark_grammar": text} if kind == "lark" else json.loads(text)["grammars"][0]
            whole = {"lark_grammar": frame, "name": "reply"}
            text = json.dumps({"grammars": [whole, {**body, "name": "body"}]})
        if len(text) > _MAX_SOURCE:
            raise FieldError(kind, f"has {len(text)} characters; at most {_MAX_SOURCE} are taken")
        matcher = llguidance.LLMatcher(self.tokens, text, log_level=0)
        if matcher.is_error():
            raise FieldError(kind, f"cannot be used: {_first_lines(matcher.get_error())}")
        return Grammar(self, kind, text, matcher)

    def _translated(self, kind: Kind, source: Any, lenient: bool) -> str:
        """Return a grammar in the form of llguidance."""
        matcher = _llguidance().LLMatcher
        if kind == "json_object":
            source = {"type": "object"}
        if kind in ("json_schema", "json_object"):
            if isinstance(source, str):
                try:
                    source = strict_json(source)
                except (ValueError, RecursionError) as error:
                    raise FieldError(kind, f"is no valid JSON: {error}") from None
            if not isinstance(source, Mapping | bool):
                raise FieldError(kind, f"is {shown(source)}; expected a JSON schema, an object")
            schema = dict(source) if isinstance(source, Mapping) else {} if source else {"not": {}}
            return matcher.grammar_from_json_schema(
                json.dumps(without_annotations(schema)),
                overrides={"whitespace_pattern": _WHITESPACE, "lenient": lenient},
            )
        if not isinstance(source, str) or not source:
            raise FieldError(kind, f"is {shown(source)}; expected text that is not empty")
        if kind == "regex":
            return matcher.grammar_from_regex(source)
        return matcher.grammar_from_lark(source)


class Grammar:
    """A compiled grammar. `GrammarTokens.compile` makes it.

    Attributes:
      source: the source, in the form of llguidance.
    """

    def __init__(self, tokens: GrammarTokens, kind: Kind, source: str, start: llguidance.LLMatcher):
        """Make a grammar from its matcher before the first token."""
        self.tokens, self.kind, self.source = tokens, kind, source
        self._start = start

    def __repr__(self) -> str:
        """Return one line."""
        return f"Grammar({self.kind}, {shown(self.source)})"

    def matcher(self) -> Matcher:
        """Begin a reply."""
        return Matcher(self.tokens, self._start.deep_copy())


class Matcher:
    """The position of one reply in its grammar."""

    def __init__(self, tokens: GrammarTokens, state: llguidance.LLMatcher):
        """Make a matcher; use `Grammar.matcher`."""
        self.tokens = tokens
        self.state = state
        self._ended = False  # by a stop id

    @property
    def is_done(self) -> bool:
        """True if the reply has ended, or the grammar allows only its end."""
        return self._ended or self.state.is_stopped()

    @property
    def may_end(self) -> bool:
        """True if the committed text is complete. It may still go on, unless `is_done`."""
        return self.state.is_accepting()

    @property
    def error(self) -> str | None:
        """The reason why no more masks can be made, such as exceeded limits, or None."""
        if not self.state.is_error():
            return None
        return f"the grammar does not go on: {_first_lines(self.state.get_error())}"

    def mask(self, drafts: Sequence[int] = ()) -> Mask:
        """Return the masks of the next position and of all drafted ones. Nothing is committed.

        Args:
          drafts: tokens that may come next.

        Returns:
          n + 1 rows for n drafts. Row i has the tokens that may follow the first i drafts. If the
          grammar does not allow a draft, verification refuses it at its row, and the rows behind it
          mean nothing. They allow everything, so that no softmax over them is undefined.
        """
        return masks([self], [drafts])[0]

    def num_allowed(self, drafts: Sequence[int]) -> int:
        """Return the number of drafts, from the first on, that are allowed. Nothing is committed.

        Where the grammar leaves no choice of the text, a mask allows one way to write it in tokens.
        """
        return num_allowed(self.mask(drafts), drafts)

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens that must follow `tokens`, as far as the grammar leaves no choice.

        Args:
          tokens: allowed next tokens. Nothing is committed.
        """
        if self._ended:
            return []
        taken = self.state.try_consume_tokens(list(tokens))
        forced = self.state.compute_ff_tokens() if taken == len(tokens) else []
        self.state.rollback(taken)
        return forced

    def commit(self, tokens: Sequence[int]) -> None:
        """Move past tokens of the reply.

        Raises:
          ValueError: the grammar does not allow one of them, or its limits are exceeded.
        """
        for token in tokens:
            if token in self.tokens.stop_ids and self.may_end:
                self._ended = self.state.is_stopped() or self.state.consume_token(token)
            elif self._ended or not self.state.consume_token(token) or self.state.is_error():
                why = self.state.get_error() or f"token {token} follows the end of the reply"
                raise ValueError(f"the grammar does not go on: {_first_lines(why)}")


def masks(
    matchers: Sequence[Matcher | None], drafts: Sequence[Sequence[int]]
) -> UInt32[np.ndarray, "rows positions words"]:
    """Return the masks of several replies, on all cores in one call.

    Args:
      matchers: None for a reply without a grammar, whose masks allow everything. At least one is
        not None.
      drafts: the drafts of each reply, as in `Matcher.mask`. The longest sets the positions.

    Raises:
      ValueError: the limits of a grammar are exceeded.
    """
    words = next(m.tokens.words for m in matchers if m is not None)
    positions = 1 + max(map(len, drafts))
    out = np.full((len(matchers), positions, words), ALL, np.uint32)
    rows = {
        i: (m, d) for i, (m, d) in enumerate(zip(matchers, drafts, strict=True)) if m is not None
    }
    fill(out, rows)
    for matcher, _ in rows.values():
        if matcher.error is not None:
            raise ValueError(matcher.error)
    return out


def fill(
    masks: UInt32[np.ndarray, "rows positions words"],
    replies: Mapping[int, tuple[Matcher, Sequence[int]]],
) -> None:
    """Write the masks of rows, on all cores in one call. A matcher that fails gets an `error`.

    Args:
      masks: contiguous, and all ones in the rows to write.
      replies: the matcher and the drafts of each row to write.
    """
    llguidance_numpy, executor = _executor()
    _, positions, words = masks.shape
    flat = masks.reshape(-1, words).view(np.int32)
    rows = [(m.state, row * positions, list(drafts)) for row, (m, drafts) in replies.items()]
    if drafted := [row for row in rows if row[2]]:
        llguidance_numpy.fill_next_token_bitmask_par_with_draft_tokens(executor, drafted, flat)
    if others := [(state, at) for state, at, ids in rows if not ids]:
        llguidance_numpy.fill_next_token_bitmask_par(executor, others, flat)


def num_allowed(mask: Mask, drafts: Sequence[int]) -> int:
    """Return the number of drafts, from the first on, that `Matcher.mask(drafts)` allows."""
    ids = np.asarray(drafts, np.int64)
    bits = mask[np.arange(len(ids)), ids // 32] >> (ids % 32).astype(np.uint32) & 1
    return len(ids) if bits.all() else int(bits.argmin())


@functools.cache
def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise FieldError(
            "grammar",
            lambda _: (
                "grammars need the package llguidance; pip install 'jaxspec-decoding[grammar]'"
            ),
        ) from None
    return llguidance


@functools.cache
def _executor() -> tuple[Any, Any]:
    """Return the module that fills masks, and its thread pool."""
    return importlib.import_module("llguidance.numpy"), _llguidance().LLExecutor()


def _first_lines(text: str) -> str:
    """Shorten a message of llguidance, which may contain the whole grammar."""
    return " ".join(text.split())[:300]
