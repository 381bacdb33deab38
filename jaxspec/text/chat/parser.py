"""Tell reasoning, answer and tool calls apart in the tokens that a model writes.

`parser_for` makes a parser. It finds markers by token id, and reads tokens one at a time. The
merged events therefore do not depend on the grouping of tokens. Under speculation several arrive at
once.

A `Format` has the markers of a family of models. There are two, `GEMMA4` and `QWEN3`. A tokenizer
without their markers gets a parser for which everything is text.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxspec.text.chat.calls import Call, GemmaCall, HermesCall
from jaxspec.text.chat.events import (
    Event,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallBroken,
    ToolCallEnd,
    ToolCallStart,
)
from jaxspec.text.chat.values import QUOTE, Malformed
from jaxspec.tokenizer import TextStream, Tokenizer, first_stop, safe_length

Role = Literal["think", "end think", "call", "end call", "quote"]
Mode = Literal["text", "reasoning", "call"]


@dataclass(frozen=True)
class Format:
    """The markers and notation of a family of models.

    Attributes:
      name: the name of the family.
      markers: tokens by their role. A tokenizer that lacks one is of another family.
      turn: the token that begins a turn.
      header: the text at the start of reasoning that is not part of it.
      call: makes a reader for the inside of a block of tool calls.
      calls_while_thinking: whether a tool call ends reasoning. Otherwise it is part of it.
      call_prefix: the text after the "call" marker, up to the tool's name.
      named_prefix: the text after the tool's name, up to the arguments.
    """

    name: str
    markers: dict[Role, str]
    turn: str
    header: str
    call: Callable[[], Call]
    calls_while_thinking: bool
    call_prefix: str
    named_prefix: str


GEMMA4 = Format(
    name="gemma4",
    markers={
        "think": "<|channel>",
        "end think": "<channel|>",
        "call": "<|tool_call>",
        "end call": "<tool_call|>",
        "quote": QUOTE,
    },
    turn="<|turn>",
    header="thought\n",
    call=GemmaCall,
    calls_while_thinking=True,
    call_prefix="call:",
    named_prefix="{",
)
QWEN3 = Format(
    name="qwen3",
    markers={
        "think": "<think>",
        "end think": "</think>",
        "call": "<tool_call>",
        "end call": "</tool_call>",
    },
    turn="<|im_start|>",
    header="",
    call=HermesCall,
    calls_while_thinking=False,
    call_prefix='\n{"name": "',
    named_prefix='", "arguments":',
)


def format_of(tokenizer: Tokenizer) -> Format | None:
    """Return the format whose markers a tokenizer has, each as one token, or None."""
    for known in (GEMMA4, QWEN3):
        if all(tokenizer.backend.token_to_id(t) is not None for t in known.markers.values()):
            return known
    return None


def parser_for(
    tokenizer: Tokenizer,
    prompt: Sequence[int] = (),
    *,
    calls: bool = True,
    stop_texts: Sequence[str] = (),
    call_id: Callable[[int], str] | None = None,
) -> Parser:
    """Return a parser for one reply.

    Args:
      prompt: the token ids of the prompt. If they end inside reasoning or a tool call, the reply
        begins there.
      calls: whether tool calls are looked for. Otherwise they are text. Pass False if the request
        declares no tools, or its `tool_choice` is "none".
      stop_texts: the request's. The answer ends before the first. Text that may be the start of one
        is held back. They apply to the answer alone: not to reasoning, and not to tool calls.
      call_id: gives the id of a call by its number. The default gives a random one.
    """
    return Parser(
        tokenizer, format_of(tokenizer), prompt, calls=calls, stop_texts=stop_texts, call_id=call_id
    )


class Parser:
    """Reads the tokens of one reply. `parser_for` makes it.

    Attributes:
      reasoning_tokens: tokens so far between the markers of reasoning.
      mode: the kind of block that the next token belongs to.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        known: Format | None,
        prompt: Sequence[int],
        *,
        calls: bool,
        stop_texts: Sequence[str],
        call_id: Callable[[int], str] | None,
    ):
        """Make a parser. The arguments are as in `parser_for`; `known` is the format."""
        self._tokenizer = tokenizer
        self._format = known
        self.reasoning_tokens = 0
        self._answer = _Answer(stop_texts)
        self._call_id = call_id or (lambda index: f"call_{uuid.uuid4().hex[:24]}")
        self._markers: dict[int, Role] = {}
        for role, marker in known.markers.items() if known else ():
            token_id = tokenizer.backend.token_to_id(marker)
            if token_id is not None and (calls or role in ("think", "end think")):
                self._markers[token_id] = role
        self.mode: Mode = "text"
        self._header: str | None = None  # the header so far; None: it is over
        self._edges = _Edges()
        self._calls = _Calls(known.call if known else GemmaCall, self._call_id)
        self._events: list[Event] = []
        self._finish_reason: str | None = None
        self._begin_segment()
        self._read_prompt(prompt)
        self.reasoning_tokens = 0  # the prompt's are not the reply's

    @property
    def finish_reason(self) -> str | None:
        """The finish reason in the protocol's words, or None before `finish`.

        It is the argument of `finish`, with two exceptions: "stop" if a stop text has ended the
        answer, and "tool_calls" instead of "stop" if the reply has tool calls and all of them are
        complete.
        """
        return self._finish_reason

    @property
    def stop_text(self) -> str | None:
        """The stop text that has ended the answer."""
        return self._answer.stop

    @property
    def answer_length(self) -> int:
        """Number of characters of the answer in the events so far."""
        return self._answer.length

    @property
    def answer_read(self) -> int:
        """Number of characters of the answer that were read, those that are held back included."""
        edges = self._edges.held if self.mode == "text" else ""
        return self._answer.length + len(self._answer.held) + len(edges)

    def push(self, token_ids: Sequence[int]) -> list[Event]:
        """Read more tokens, and return the events that are certain now."""
        for token_id in token_ids:
            self._read(token_id)
        return self._take()

    def finish(self, reason: str) -> list[Event]:
        """Return the last events. The tokens that ended generation have been pushed.

        Args:
          reason: the reason why generation ended. A tool call that is not complete is text. It is
            repaired if only brackets are missing and the model itself ended its turn.
        """
        assert self._finish_reason is None, "finish is called once"
        self._end_segment()
        if self.mode == "call":
            ended_turn = reason == "stop" and bool(self._ids) and self._is_mark(self._ids[-1])
            self._end_call(was_cut=not ended_turn)
        elif self.mode == "text":
            self._add_text(self._edges.held)
        self._end_answer()
        if self.stop_text is not None:
            reason = "stop"
        self._finish_reason = (
            "tool_calls" if reason == "stop" and self._calls.all_complete else reason
        )
        return self._take()

    @property
    def complete_calls(self) -> int:
        """Number of tool calls so far that are complete."""
        return self._calls.complete

    @property
    def repaired_calls(self) -> int:
        """Number of the complete tool calls that were not well formed."""
        return self._calls.repaired

    @property
    def broken_calls(self) -> int:
        """Number of tool calls that could not be read, and became text."""
        return self._calls.broken

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    @property
    def begins_text(self) -> bool:
        """True between a marker and the text behind it, where newlines belong to the format."""
        return self.mode == "text" and self._edges.at_start

    def ends_block(self, token_id: int) -> bool:
        """Return whether a token would now end a block of text, reasoning or calls."""
        role = self._markers.get(token_id)
        return role is not None and role != "quote" and self._marks(role)

    def _read_prompt(self, prompt: Sequence[int]) -> None:
        """Read the end of the prompt, from the marker of a block that it leaves open."""
        turn = self._format and self._tokenizer.backend.token_to_id(self._format.turn)
        for start in reversed(range(len(prompt))):
            role = self._markers.get(prompt[start])
            if prompt[start] == turn or role in ("end think", "end call"):
                return
            if role in ("think", "call"):
                for token_id in prompt[start:]:
                    self._read(token_id)
                if self.mode == "reasoning":
                    self._end_segment()
                    self._begin_segment()
                # The model did not write the prompt's text. A call that the prompt begins belongs
                # to the reply nevertheless.
                self._events = [e for e in self._events if not isinstance(e, Text | Reasoning)]
                return

    def _read(self, token_id: int) -> None:
        role = self._markers.get(token_id)
        if role is None or not self._marks(role):
            self.reasoning_tokens += self.mode == "reasoning"
            self._ids.append(token_id)
            self._piece(self._stream.push(self._ids))
            return
        self._end_segment()
        if role == "quote":
            self._events += self._calls.feed(QUOTE)
        elif role == "think":
            self._enter("reasoning")
        elif role == "call":
            self._enter("call")
        else:
            self._enter("text")
        self._begin_segment()

    def _marks(self, role: Role) -> bool:
        """Return whether a marker acts as one here. Otherwise it is an ordinary token."""
        if role == "quote":
            return self.mode == "call"
        if role in ("call", "end call") and self.mode == "reasoning":
            return self._format is not None and self._format.calls_while_thinking
        return True

    def _enter(self, mode: Mode) -> None:
        """Leave the block that the last marker began, and begin another."""
        if self.mode == "call":
            self._end_call(was_cut=False)
        self._end_answer()
        self.mode = mode
        self._edges = _Edges(after_marker=True)
        self._header = "" if mode == "reasoning" and self._format and self._format.header else None
        if mode == "call":
            self._calls.begin_block()

    def _begin_segment(self) -> None:
        """Begin to decode the tokens between two markers."""
        self._ids: list[int] = []
        self._stream = TextStream(self._tokenizer)

    def _end_segment(self) -> None:
        self._piece(self._stream.finish(self._ids))

    def _piece(self, text: str) -> None:
        """Take the next text of a segment."""
        if not text:
            return
        if self.mode == "call":
            for unit in text:
                self._events += self._calls.feed(unit)
            return
        if self._header is not None and self._format is not None:
            header, begun = self._format.header, self._header + text
            if len(begun) < len(header) and header.startswith(begun):
                self._header = begun
                return
            self._header, text = None, begun.removeprefix(header)
        text = self._edges.trim(text)
        if self.mode == "text":
            self._add_text(text)
        elif text:
            self._events.append(Reasoning(text))

    def _add_text(self, text: str) -> None:
        """Add text to the answer."""
        if text := self._answer.push(text):
            self._events.append(Text(text))

    def _end_answer(self) -> None:
        """Say what was held back: no stop text reaches over a marker."""
        if text := self._answer.finish():
            self._events.append(Text(text))

    def _end_call(self, *, was_cut: bool) -> None:
        """End a block of calls. What is no call becomes text of the answer."""
        events, raw = self._calls.end_block(was_cut=was_cut)
        self._events += events
        if raw and self.stop_text is None:
            self._answer.length += len(raw)
            self._events.append(Text(raw))

    def _is_mark(self, token_id: int) -> bool:
        """Return whether a token is special, such as the end of a turn: it has no text."""
        return not self._tokenizer.decode([token_id])


class _Answer:
    """The answer, which ends before the first stop text.

    Attributes:
      length: number of characters that are certain.
      held: text that may be the start of a stop text.
      stop: the stop text that has ended the answer.
    """

    def __init__(self, stop_texts: Sequence[str]):
        self._stop_texts = tuple(stop_texts)
        self.length, self.held = 0, ""
        self.stop: str | None = None

    def push(self, text: str) -> str:
        """Return the text that is certain, whatever follows."""
        if self.stop is not None:
            return ""
        text = self.held + text
        end = safe_length(text, self._stop_texts)
        if (first := first_stop(text, self._stop_texts)) is not None:
            self.stop, self.held = first[1], ""
        else:
            self.held = text[end:]
        self.length += end
        return text[:end]

    def finish(self) -> str:
        """Return the text that was held back."""
        text, self.held = self.held, ""
        self.length += len(text)
        return text


class _Edges:
    """Drops the newlines beside a marker. They belong to the format."""

    def __init__(self, *, after_marker: bool = False):
        self.at_start = after_marker
        self.held = ""  # newlines at the end so far, which a marker may follow

    def trim(self, text: str) -> str:
        """Return the text that is certain, whatever follows."""
        if self.at_start:
            text = text.lstrip("\n")
            self.at_start = not text
        text = self.held + text
        body = text.rstrip("\n")
        self.held = text[len(body) :]
        return body


class _Calls:
    """Turns the text of tool call blocks into events.

    Attributes:
      complete, repaired, broken: numbers of calls, as in `Parser`.
    """

    def __init__(self, make: Callable[[], Call], call_id: Callable[[int], str]):
        self._make, self._call_id = make, call_id
        self._begun = self.complete = self.repaired = self.broken = 0
        self.begin_block()

    @property
    def all_complete(self) -> bool:
        """True if there are calls, and all of them are complete."""
        return self.complete > 0 and not self.broken

    def begin_block(self) -> None:
        """Expect a block of calls."""
        self._is_first = True  # of the calls in the block
        self._begin_call()

    def _begin_call(self) -> None:
        self._call = self._make()
        self._raw: list[str] = []  # the text of the call
        self._in_progress = False  # whether the call has begun
        self._why: str | None = None  # the error in the call

    def feed(self, unit: str) -> list[Event]:
        """Read a character of a block, or `QUOTE`."""
        if not self._raw and unit.isspace():
            return []
        self._raw.append(unit)
        if self._why is not None:
            return []
        try:
            self._call.feed(unit)
        except Malformed as error:
            self._why = str(error)
        return self._new_events()

    def _new_events(self) -> list[Event]:
        events: list[Event] = []
        if self._call.name is not None and not self._in_progress:
            self._in_progress = True
            events.append(ToolCallStart(self._begun, self._call_id(self._begun), self._call.name))
            self._begun += 1
        if self._in_progress and (delta := self._call.take()):
            events.append(ToolCallArguments(self._begun - 1, delta))
        if self._call.done:
            events.append(ToolCallEnd(self._begun - 1))
            self.complete += 1
            self.repaired += self._call.repaired
            self._is_first = False
            self._begin_call()  # another may follow in the same block
        return events

    def end_block(self, *, was_cut: bool) -> tuple[list[Event], str]:
        """Return the last events of a block, and the text of a call that cannot be read.

        Args:
          was_cut: whether generation ended for another reason than the model's own stop.
        """
        raw = "".join(self._raw).strip()
        if not raw.strip("}]") and (not raw or not self._is_first):
            self.repaired += bool(raw)  # a bracket too many behind a complete call
            return [], ""
        events: list[Event] = []
        if self._why is None and not was_cut:
            with contextlib.suppress(Malformed):
                self._call.close()
            events = self._new_events()
            if events and isinstance(events[-1], ToolCallEnd):
                return events, ""
        self.broken += 1
        if self._in_progress:
            end = "generation" if was_cut else "the block"
            why = self._why or f"{end} ended inside the call"
            events.append(ToolCallBroken(self._begun - 1, why))
        return events, raw
