"""Make the tables of an automaton from a regular expression or a schema, and a vocabulary.

Three steps, the first by outlines-core:

1. Expression to states over bytes. A few hundred states have a few thousand edges.
2. Bytes to classes of tokens. A token's effect is a column: the state that it leads to, from each
   state. Columns are computed byte by byte, once for all tokens with the same column so far. The
   work therefore does not grow with states times tokens.
3. Removal of states that tokens cannot reach, or from which tokens cannot reach an end.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int, UInt32

from jaxspec.options import FieldError, shown
from jaxspec.text.grammars.automaton import FREE, Automaton
from jaxspec.text.grammars.json_regex import regex_of
from jaxspec.text.grammars.matcher import GrammarTokens, Kind

MAX_BYTES = 64 * 2**20
"""The size limit of the tables of one automaton."""
WAY_OUT = "use a simpler one, or an Engine or `jaxspec serve`, which follow it on the host"

# Ends every expression. outlines-core 0.2.14 forgets that a match may go on, wherever what follows
# is not yet a match: after "4" it does not allow the "." of [0-9](\\.[0-9])?. With an end mark,
# nothing that bytes spell is a match. The last code point of Unicode is no character.
_END = "\U0010ffff"
_END_ID = 256  # among 256 bytes
_MAX_REGEX = 20_000
_MAX_STATES = 8_000
_AT_A_TIME = 4_096  # columns


def automaton(tokens: GrammarTokens, kind: Kind, *sources: Any) -> Automaton:
    """Make the tables of one or more grammars.

    Sizes are rounded up, so that programs compiled for one grammar often fit another.

    Args:
      kind: "regex", a regular expression of the whole reply in the syntax of Rust's regex crate; or
        "json_schema", as far as `json_regex.regex_of` supports it.
      sources: one for all rows of a call, or one for each prompt. None: that prompt has no grammar.

    Raises:
      FieldError: outlines-core is not installed, a grammar is wrong, or it cannot become a table.
        The field is the kind.
    """
    if kind == "json_schema":
        regexes = [None if s is None else regex_of(s) for s in sources]
    elif kind == "regex":
        regexes = list(sources)
    else:
        why = "may nest without bound" if kind == "json_object" else "may need a stack"
        raise FieldError(kind, f"{why}, which a table of states cannot follow; {WAY_OUT}")
    if not sources:
        raise FieldError(kind, "is missing")
    parts = [None if r is None else _bytes(kind, r) for r in regexes]
    offsets = np.cumsum([0, *(0 if p is None else len(p.step) for p in parts)])
    size, present = int(offsets[-1]), [p for p in parts if p is not None]
    if size > _MAX_STATES:
        _refuse_size(kind, f"{size} states over bytes")
    # One state more is dead: nothing leads out of it.
    step = np.full((size + 1, 256), size, np.int32)
    for offset, part in zip(offsets, parts, strict=False):
        if part is not None:
            moved = np.where(part.step >= 0, part.step + offset, size)
            step[offset : offset + len(part.step)] = moved
    starts = [FREE if p is None else int(o) + p.start for o, p in zip(offsets, parts, strict=False)]
    may_end = np.concatenate([p.may_end for p in present]) if present else np.zeros(0, bool)
    return _Maker(tokens, kind).tables(step, may_end, np.array(starts))


class _OverBytes(NamedTuple):
    """The states of one expression over bytes. `step` is -1 where no match goes on."""

    step: Int[np.ndarray, "S 256"]
    may_end: Bool[np.ndarray, " S"]
    start: int


def _bytes(kind: Kind, regex: Any) -> _OverBytes:
    """Return the states of an expression over bytes."""
    if not isinstance(regex, str) or not regex:
        raise FieldError(kind, f"is {shown(regex)}; expected text that is not empty")
    if len(regex) > _MAX_REGEX:
        reason = f"has {len(regex)} characters as an expression; at most {_MAX_REGEX} are taken"
        raise FieldError(kind, f"{reason}; {WAY_OUT}")
    try:
        index = _outlines().Index(f"(?:{regex}){_END}", _byte_vocabulary())
    except FieldError:
        raise
    except Exception as error:  # the bindings raise what they like
        why = " ".join(str(error).split())[:300]
        raise FieldError(kind, f"{shown(regex)} cannot be used: {why}") from None
    transitions, finals = index.get_transitions(), index.get_final_states()
    if len(transitions) > _MAX_STATES:
        _refuse_size(kind, f"{len(transitions)} states over bytes")
    number = {name: i for i, name in enumerate(transitions)}
    step = np.full((len(number), 256), -1, np.int32)
    may_end = np.zeros(len(number), bool)
    for name, following in transitions.items():
        for byte, to in following.items():
            if byte == _END_ID:
                may_end[number[name]] |= to in finals
            elif byte < 256 and to in number:
                step[number[name], byte] = number[to]
    before: list[list[int]] = [[] for _ in number]
    for name, following in transitions.items():
        for to in following.values():
            if to in number:
                before[number[to]].append(number[name])
    useful = _reached(np.flatnonzero(may_end).tolist(), before)
    step[~(useful[step] & (step >= 0))] = -1
    return _OverBytes(step, may_end, number[index.get_initial_state()])


class _Maker:
    """Makes tables for a vocabulary."""

    def __init__(self, tokens: GrammarTokens, kind: Kind):
        self.tokens: GrammarTokens = tokens
        self.kind: Kind = kind
        self.texts, self.lengths, self.ids = _spelled(tokens)

    def tables(
        self, step: Int[np.ndarray, "dead 256"], may_end: Bool[np.ndarray, " S"], starts: Any
    ) -> Automaton:
        """Return tables of states over bytes, the last of which is dead."""
        classes, columns = self._classes(step)
        dead = ended = len(step) - 1
        # The dead state's number becomes that of a state that has ended. Stop ids have their own
        # class.
        after = np.where(columns == dead, FREE, columns)
        stop = np.where(may_end, ended, FREE)
        after = np.concatenate([after, stop[None]])
        classes[[*self.tokens.stop_ids]] = len(after) - 1
        last = np.full((len(after), 1), FREE)
        last[-1] = ended
        after = np.concatenate([after, last], axis=1).T
        kept = _useful(after, [s for s in starts.tolist() if s != FREE], ended)
        if not all(kept[s] for s in starts if s != FREE):
            raise FieldError(self.kind, "matches no text that tokens can spell")
        number = np.full(len(after) + 1, FREE)
        number[:-1][kept] = np.arange(int(kept.sum()))
        likely = np.array(
            [self._likely(step, may_end, s) for s in np.flatnonzero(kept).tolist()], np.int32
        )
        after = number[after[kept]]
        columns, same = np.unique(after, axis=1, return_inverse=True)
        classes = same.reshape(-1)[classes]
        return self._packed(columns, classes, likely, number[starts])

    def _classes(self, step: Int[np.ndarray, "dead 256"]) -> tuple[Any, Any]:
        """Return the class of each token, and the states that each class leads to."""
        dead = len(step) - 1
        byte_columns, byte_class = np.unique(step, axis=1, return_inverse=True)
        byte_class = byte_class.reshape(-1)
        nothing = np.full(dead, dead, np.int32)
        known = {nothing.tobytes(): 0}
        effects = [nothing, np.arange(dead, dtype=np.int32)]
        known.setdefault(effects[1].tobytes(), 1)
        at = np.ones(len(self.ids), np.int64)
        for position in range(self.texts.shape[1]):
            on = np.flatnonzero((self.lengths > position) & (at > 0))
            if not len(on):
                break
            kinds = byte_class[self.texts[on, position]]
            pairs, pair = np.unique(at[on] * byte_columns.shape[1] + kinds, return_inverse=True)
            numbers = []
            for chunk in _chunks(pairs):
                before, kind = np.divmod(chunk, byte_columns.shape[1])
                made = byte_columns[np.stack([effects[i] for i in before]), kind[:, None]]
                for column in made:
                    new = known.setdefault(column.tobytes(), len(effects))
                    if new == len(effects):
                        effects.append(column)
                    numbers.append(new)
                if len(effects) * dead * 2 > MAX_BYTES:
                    _refuse_size(self.kind, f"{dead} states and more than {len(effects)} classes")
            at[on] = np.array(numbers)[pair.reshape(-1)]
        classes = np.zeros(self.tokens.vocab_size, np.int64)
        classes[self.ids] = at
        return classes, np.stack(effects)

    def _likely(self, step: Any, may_end: Any, state: int) -> int:
        """Return the longest token of the text that must follow, or `FREE`."""
        stop, text = min(self.tokens.stop_ids), b""
        if state == len(may_end):
            return stop
        while not may_end[state] and len(text) < self.texts.shape[1]:
            (following,) = np.nonzero(step[state] < len(may_end))
            if len(following) != 1:
                break
            text += bytes(following.tolist())
            state = int(step[state, following[0]])
        else:
            if not text and not (step[state] < len(may_end)).any():
                return stop
        by_text = _by_text(self.tokens)
        return next(
            (by_text[text[:n]] for n in range(len(text), 0, -1) if text[:n] in by_text), FREE
        )

    def _packed(self, after: Any, classes: Any, likely: Any, starts: Any) -> Automaton:
        """Return tables whose sizes are rounded up."""
        used, words = len(after), self.tokens.words
        states, columns = (_bucket(n, least) for n, least in ((used, 16), (after.shape[1], 32)))
        if (size := states * (columns * 2 + words * 4) + classes.size * 4) > MAX_BYTES:
            _refuse_size(
                self.kind,
                f"{used} states and {after.shape[1]} classes of {classes.size} tokens, tables of "
                f"{size / 2**20:.0f} MiB",
            )
        table = np.full((states, columns), FREE, np.int16)
        table[:used, : after.shape[1]] = after
        masks = np.zeros((states, words), np.uint32)
        for row in range(used):
            masks[row] = _bits(after[row, classes] >= 0, words)
        return Automaton(
            classes=jnp.asarray(classes, jnp.int32),
            next=jnp.asarray(table),
            masks=jnp.asarray(masks),
            likely=jnp.asarray(np.pad(likely, (0, states - used), constant_values=FREE)),
            starts=jnp.asarray(starts, jnp.int32),
            stops=jnp.asarray(sorted(self.tokens.stop_ids), jnp.int32),
        )


def _useful(after: Any, starts: list[int], ended: int) -> Bool[np.ndarray, " S"]:
    """Remove edges to states that cannot reach an end. Return the states that are still reached."""
    edges = [np.unique(row[row >= 0]) for row in after]
    before: list[list[int]] = [[] for _ in edges]
    for state, following in enumerate(edges):
        for to in following.tolist():
            before[to].append(state)
    ends = _reached([ended], before)
    after[~np.append(ends, False)[after]] = FREE
    reached = _reached(starts, [row[ends[row]].tolist() for row in edges])
    return reached & ends


def _reached(begin: list[int], edges: Any) -> Bool[np.ndarray, " S"]:
    reached = np.zeros(len(edges), bool)
    reached[begin] = True
    for state in (waiting := [*begin]):
        for to in edges[state]:
            if not reached[to]:
                reached[to] = True
                waiting.append(to)
    return reached


def _chunks(values: Any) -> Iterator[Any]:
    for i in range(0, len(values), _AT_A_TIME):
        yield values[i : i + _AT_A_TIME]


def _bucket(count: int, least: int) -> int:
    """Round a size up: to a power of two up to 256, and to multiples of 256 beyond."""
    return max(least, 1 << (count - 1).bit_length()) if count <= 256 else -(-count // 256) * 256


def _bits(allowed: Bool[np.ndarray, " V"], words: int) -> UInt32[np.ndarray, " words"]:
    out = np.zeros(words * 4, np.uint8)
    bits = np.packbits(allowed, bitorder="little")
    out[: len(bits)] = bits
    return out.view("<u4")


def _refuse_size(kind: Kind, what: str) -> None:
    raise FieldError(
        kind, f"has {what}; at most {MAX_BYTES // 2**20} MiB are kept on the device; {WAY_OUT}"
    )


def _outlines() -> Any:
    try:
        return importlib.import_module("outlines_core")
    except ImportError:
        raise FieldError(
            "grammar",
            "needs the package outlines-core; pip install 'jaxspec-decoding[grammar]'",
        ) from None


@functools.cache
def _byte_vocabulary() -> Any:
    # The library allows one id where an expression may end. This one is no byte.
    ids = {bytes([byte]): [byte] for byte in range(256)} | {_END.encode(): [_END_ID]}
    return _outlines().Vocabulary(_END_ID + 1, ids)


@functools.lru_cache(maxsize=4)
def _spelled(tokens: GrammarTokens) -> tuple[Any, Any, Any]:
    """Return the bytes of tokens, padded, their lengths and their ids. Special tokens have none."""
    spelled = []
    for i in range(tokens.vocab_size):
        data = b"" if tokens.tokens.is_special_token(i) else tokens.tokens.decode_bytes([i])
        if data and i not in tokens.stop_ids:
            spelled.append((i, data))
    lengths = np.array([len(data) for _, data in spelled])
    texts = np.zeros((len(spelled), int(lengths.max(initial=1))), np.uint8)
    for row, (_, data) in enumerate(spelled):
        texts[row, : len(data)] = np.frombuffer(data, np.uint8)
    return texts, lengths, np.array([i for i, _ in spelled], np.int64)


@functools.lru_cache(maxsize=4)
def _by_text(tokens: GrammarTokens) -> dict[bytes, int]:
    texts, lengths, ids = _spelled(tokens)
    spelled = zip(ids.tolist(), texts, lengths.tolist(), strict=True)
    return {text[:n].tobytes(): i for i, text, n in spelled}
