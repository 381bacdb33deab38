"""Format of replies: text, reasoning, tool calls, log-probabilities and usage, from tokens.

Read `TextChoice`, then `ChatChoice`. Both take all tokens so far and return a `Delta`. Replies in
one piece and streams use the same code. It does not matter how many tokens come at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxspec.engine.request import Completion
from jaxspec.serving.handle import RequestOutput
from jaxspec.serving.parse_request import ParsedRequest
from jaxspec.serving.prompt_logprobs import PromptScores, TopLogprobs
from jaxspec.serving.verify_steps import StepSplitter
from jaxspec.text import chat
from jaxspec.text.chat.values import QUOTE
from jaxspec.tokenizer import TextStream, Tokenizer, first_stop

_UTF8 = codecs.getincrementaldecoder("utf-8")
MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks."""


@dataclass
class Usage:
    """Counts of a reply's tokens and of its faulty calls, over all its choices."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    accepted_tokens: int = 0
    drafted_tokens: int = 0
    repaired_calls: int = 0
    broken_calls: int = 0

    def add(self, completion: Completion, choice: TextChoice | ChatChoice) -> None:
        """Count a completion. Accepted drafts that a stop or the limit cut do not count."""
        ids = completion.token_ids
        steps = StepSplitter().push(len(ids), completion.acceptance_lengths)
        if isinstance(choice, ChatChoice):
            self.reasoning_tokens += choice.parser.reasoning_tokens
            self.repaired_calls += choice.parser.repaired_calls
            self.broken_calls += choice.parser.broken_calls
        self.completion_tokens += len(ids)
        self.cached_tokens += completion.cached_tokens
        self.accepted_tokens += sum(accepted for _, accepted in steps)
        self.drafted_tokens += sum(completion.verify_lengths)

    def to_json(self) -> dict[str, Any]:
        """Return `usage` of /v1/completions and /v1/chat/completions."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": self.prompt_details,
            "completion_tokens_details": self.details,
        }

    @property
    def prompt_details(self) -> dict[str, int]:
        """Counts of prompt tokens by kind. Clients require all; writing to the cache is free."""
        return {"cached_tokens": self.cached_tokens, "cache_write_tokens": 0}

    @property
    def details(self) -> dict[str, int]:
        """Counts of new tokens by kind, as in `completion_tokens_details`."""
        return {
            "reasoning_tokens": self.reasoning_tokens,
            "accepted_prediction_tokens": self.accepted_tokens,
            "rejected_prediction_tokens": self.drafted_tokens - self.accepted_tokens,
        }


def finish_reason(completion: Completion, stop_text: str | None = None) -> str:
    """Return the protocol's `finish_reason` of a completion."""
    return "stop" if completion.finish_reason == "stop" or stop_text is not None else "length"


def stop_reason(
    completion: Completion, stop_text: str | None, stop_token_ids: Sequence[int]
) -> int | str | None:
    """Return the stop id or stop text of the request that ended a completion, or None.

    Args:
      stop_text: the one that has ended the reply's text.
      stop_token_ids: the request's stop ids, without the checkpoint's.
    """
    if stop_text is not None:
        return stop_text
    ids = completion.token_ids
    is_id = completion.finish_reason == "stop" and bool(ids) and ids[-1] in stop_token_ids
    return ids[-1] if is_id else None


# --- log-probabilities ----------------------------------------------------------------------------


@dataclass(frozen=True)
class LogprobsFormatter:
    """Formats log-probabilities for the generating routes.

    Attributes:
      top: number of best tokens to show beside each token.
    """

    tokenizer: Tokenizer
    top: int

    def completion_logprobs(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float | None],
        top_logprobs: Sequence[TopLogprobs | None],
        offsets: Sequence[int],
    ) -> dict[str, Any]:
        """Return `logprobs` of /v1/completions.

        Args:
          offsets: where the text of each token begins, in characters of the reply.
        """
        return {
            "tokens": [self._token(i) for i in ids],
            "token_logprobs": [None if x is None else _number(x) for x in logprobs],
            "top_logprobs": [
                None if t is None else self._by_text(t[: self.top]) for t in top_logprobs
            ]
            if self.top
            else None,
            "text_offset": [*offsets],
        }

    def entry(self, output: RequestOutput, index: int) -> dict[str, Any]:
        """Return the entry of one token, with the best tokens at its position."""
        top = output.top_logprobs[index][: self.top] if output.top_logprobs else ()
        entry = self._entry(output.token_ids[index], (output.logprobs or ())[index])
        return {**entry, "top_logprobs": [self._entry(i, x) for i, x in top]}

    def prompt_logprobs(self, scores: PromptScores) -> list[dict[str, Any] | None]:
        """Return `prompt_logprobs`: the prompt's token and the best tokens of each position."""
        entries: list[dict[str, Any] | None] = [None]
        top_logprobs = scores.top_logprobs or ((),) * len(scores.logprobs)
        for own, logprob, top in zip(scores.ids[1:], scores.logprobs, top_logprobs, strict=True):
            by_id = {own: logprob, **dict(top[: self.top])}
            entries.append(
                {
                    str(i): {"logprob": _number(x), "decoded_token": self._token(i)}
                    for i, x in by_id.items()
                }
            )
        return entries

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        token = self._token(token_id)
        token_bytes = list(self.tokenizer.bytes_of(token_id, token))
        return {"token": token, "logprob": _number(logprob), "bytes": token_bytes}

    def _by_text(self, top: TopLogprobs) -> dict[str, float]:
        """Return log-probabilities by text, the best of tokens with the same text."""
        by_text: dict[str, float] = {}
        for token_id, logprob in top:
            by_text.setdefault(self._token(token_id), _number(logprob))
        return by_text

    def _token(self, token_id: int) -> str:
        return self.tokenizer.backend.decode([token_id], skip_special_tokens=False)


def _number(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB) if logprob == logprob else MIN_LOGPROB


class TextOffsets:
    """Finds where the text of each token begins. Tokens of one character begin where it begins.

    Args:
      start: number of characters before the first token.
    """

    def __init__(self, tokenizer: Tokenizer, start: int = 0):
        self._tokenizer = tokenizer
        self._stream, self._ids = TextStream(tokenizer), list[int]()
        self._settled, self._in_run = start, 0  # characters before a run of raw bytes, and in it
        self._decoder = _UTF8(errors="replace")

    def push(self, token_id: int) -> int:
        """Return where the text of the next token begins."""
        offset = self._settled + self._in_run
        self._ids.append(token_id)
        if piece := self._stream.push(self._ids):
            self._settled += len(piece)
            self._in_run = 0
            self._decoder.reset()
        elif text := self._tokenizer.decode([token_id]):  # else it is special
            self._in_run += len(self._decoder.decode(self._tokenizer.bytes_of(token_id, text)))
        return offset


class AnswerLogprobs:
    """Selects the log-probabilities of a chat's answer, without reasoning, calls and markers."""

    def __init__(self, tokenizer: Tokenizer, top: int):
        """Start at the beginning of a reply."""
        self._tokenizer = tokenizer
        self._formatter = LogprobsFormatter(tokenizer, top)
        # Entries of tokens that the client does not see yet, and where in the answer they begin.
        self._held: list[tuple[int, dict[str, Any]]] = []
        self._call: list[dict[str, Any]] = []  # of the block of calls, which may become text

    def push(
        self, parser: chat.Parser, output: RequestOutput, begin: int
    ) -> Iterator[tuple[list[chat.Event], list[dict[str, Any]]]]:
        """Parse the tokens from `begin` on; yield events, and the entries of their text."""
        for index, token_id in enumerate(output.token_ids[begin:], begin):
            ends_block, broken = parser.ends_block(token_id), parser.broken_calls
            if not ends_block and self._has_text(parser, token_id):
                if parser.mode == "call":
                    self._call.append(self._formatter.entry(output, index))
                elif parser.mode == "text":
                    self._held.append((parser.answer_read, self._formatter.entry(output, index)))
            events = parser.push((token_id,))
            released = self.release(parser, broken)
            if ends_block:  # newlines before a marker are no text
                self._held, self._call = [], []
            elif any(isinstance(event, chat.ToolCallEnd) for event in events):
                self._call = []
            yield events, released

    def _has_text(self, parser: chat.Parser, token_id: int) -> bool:
        """Return whether a token has text where it stands. The end of a turn has none."""
        text = self._tokenizer.decode([token_id])
        if parser.begins_text:
            text = text.lstrip("\n")  # which belong to the marker before
        return bool(text) or self._tokenizer.backend.id_to_token(token_id) == QUOTE

    def release(self, parser: chat.Parser, broken_calls: int) -> list[dict[str, Any]]:
        """Return the entries of the text that the parser's newest events have.

        Args:
          broken_calls: the parser's number of them before these events.
        """
        released = [entry for start, entry in self._held if start < parser.answer_length]
        self._held = self._held[len(released) :]
        if parser.broken_calls > broken_calls:
            released += self._call
            self._call = []
        return released


# --- choices --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Delta:
    """New content of a choice since the last output.

    Attributes:
      fields: content in the protocol's fields; empty while the new text is not certain.
      token_ids: new tokens.
      logprobs: log-probabilities of the new tokens, if the request has them.
      finish_reason: None while the choice goes on.
      token_deltas: fields that each token added, if the request has `return_steps`.
      rest: fields beyond `token_deltas`: text that was held back until the end.
    """

    fields: dict[str, Any]
    token_ids: tuple[int, ...]
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    token_deltas: tuple[dict[str, Any], ...] = ()
    rest: dict[str, Any] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to send yet."""
        has_content = self.fields or self.token_deltas
        return not has_content and self.logprobs is None and self.finish_reason is None


class TextChoice:
    """A choice of /v1/completions, which is plain text.

    Attributes:
      stop_text: the stop text that has ended it.
    """

    def __init__(self, tokenizer: Tokenizer, parsed: ParsedRequest, index: int):
        self.index = index
        self.stop_text: str | None = None
        self._prompt = parsed.prompt_of(index) if parsed.echo else None
        self._tokenizer, self._stops = tokenizer, parsed.stops
        self._stream = TextStream(tokenizer, parsed.stops)
        top = parsed.top_logprobs
        self._formatter = None if top is None else LogprobsFormatter(tokenizer, top)
        self._by_token = parsed.return_steps
        self._seen = self._length = 0  # tokens, and characters that the client has
        self._offsets = TextOffsets(tokenizer)
        self._held: list[tuple[int, int]] = []  # tokens that it has not, and where they begin

    def echo(self, scores: PromptScores | None) -> Delta | None:
        """Return the prompt as the choice's first delta, or None if the request has no `echo`."""
        if self._prompt is None:
            return None
        logprobs = None
        if self._formatter is not None and scores is not None:
            top = (None, *scores.top_logprobs)
            offsets = [self._offsets.push(token_id) for token_id in scores.ids]
            logprobs = self._formatter.completion_logprobs(
                scores.ids, (None, *scores.logprobs), top, offsets
            )
        text = self._tokenizer.decode(self._prompt)
        self._length = len(text)
        self._offsets = TextOffsets(self._tokenizer, self._length)
        return Delta({"text": text}, (), logprobs)

    def push(self, output: RequestOutput) -> Delta:
        """Return the content that is new since the last call. `output` has all tokens so far."""
        is_done = isinstance(output, Completion)
        ids, begin, self._seen = output.token_ids, self._seen, len(output.token_ids)
        pieces: list[str] = []
        if self._by_token:
            pieces = [self._stream.push(ids[:end]) for end in range(begin + 1, len(ids) + 1)]
        rest = self._stream.finish(ids) if is_done else self._stream.push(ids)
        text = "".join(pieces) + rest
        self._length += len(text)
        if is_done and (stop := first_stop(self._tokenizer.decode(ids), self._stops)):
            self.stop_text = stop[1]
        return Delta(
            {"text": text} if text else {},
            ids[begin:],
            None if self._formatter is None else self._logprobs(self._formatter, output, begin),
            finish_reason(output, self.stop_text) if isinstance(output, Completion) else None,
            tuple({"text": piece} if piece else {} for piece in pieces),
            {"text": rest} if rest else {},
        )

    def _logprobs(
        self, formatter: LogprobsFormatter, output: RequestOutput, begin: int
    ) -> dict[str, Any] | None:
        """Return the log-probabilities of the tokens whose text the client has."""
        new = range(begin, len(output.token_ids))
        self._held += [(i, self._offsets.push(output.token_ids[i])) for i in new]
        is_whole = isinstance(output, Completion) and self.stop_text is None
        count = sum(is_whole or offset < self._length for _, offset in self._held)
        seen, self._held = self._held[:count], self._held[count:]
        if not seen and not isinstance(output, Completion):
            return None
        all_top = output.top_logprobs or ()
        return formatter.completion_logprobs(
            [output.token_ids[i] for i, _ in seen],
            [(output.logprobs or ())[i] for i, _ in seen],
            [all_top[i] for i, _ in seen] if all_top else (),
            [offset for _, offset in seen],
        )


def join(echo: Delta | None, delta: Delta) -> Delta:
    """Return the echo of a prompt and the text after it as one delta."""
    if echo is None:
        return delta
    text = echo.fields["text"] + delta.fields.get("text", "")
    logprobs = echo.logprobs
    if logprobs is not None and delta.logprobs is not None:
        more = delta.logprobs
        logprobs = {k: v if v is None else [*v, *more[k]] for k, v in logprobs.items()}
    return Delta({"text": text}, delta.token_ids, logprobs, delta.finish_reason)


class ChatChoice:
    """A choice of /v1/chat/completions: text, reasoning and tool calls.

    Attributes:
      parser: reads its tokens.
    """

    def __init__(self, tokenizer: Tokenizer, parsed: ParsedRequest, index: int):
        self.index = index
        self.parser = chat.parser_for(
            tokenizer, parsed.prompt_of(index), calls=parsed.tools.calls, stop_texts=parsed.stops
        )
        top = parsed.top_logprobs
        self._logprobs = None if top is None else AnswerLogprobs(tokenizer, top)
        self._by_token = parsed.return_steps
        self._seen = 0

    @property
    def stop_text(self) -> str | None:
        """The stop text that has ended the answer."""
        return self.parser.stop_text

    def push(self, output: RequestOutput) -> Delta:
        """Return the content that is new since the last call. `output` has all tokens so far."""
        begin, self._seen = self._seen, len(output.token_ids)
        groups = self.read(output, begin)
        by_token = groups[: self._seen - begin] if self._by_token else []
        entries = [entry for _, entries in groups for entry in entries]
        rest = [event for events, _ in groups[len(by_token) :] for event in events]
        return Delta(
            _delta_fields(event for events, _ in groups for event in events),
            output.token_ids[begin:],
            {"content": entries, "refusal": None} if entries else None,
            self.parser.finish_reason,
            tuple(_delta_fields(events) for events, _ in by_token),
            _delta_fields(rest),
        )

    def message(self, completion: Completion) -> tuple[dict[str, Any], Delta]:
        """Return the message of a whole reply, and a delta with all else."""
        groups = self.read(completion, 0)
        entries = [entry for _, entries in groups for entry in entries]
        logprobs = None if self._logprobs is None else {"content": entries, "refusal": None}
        delta = Delta({}, completion.token_ids, logprobs, self.parser.finish_reason)
        return chat.message_of([event for events, _ in groups for event in events]), delta

    def read(
        self, output: RequestOutput, begin: int
    ) -> list[tuple[list[chat.Event], list[dict[str, Any]]]]:
        """Parse the tokens from `begin` on, and end the reply if the output is a completion.

        Returns:
          Events, and entries of log-probabilities. There is a pair for each token if the request
          has `logprobs` or `return_steps`, and one for the end.
        """
        new, parser = output.token_ids[begin:], self.parser
        if self._logprobs is not None:
            groups = list(self._logprobs.push(parser, output, begin))
        elif self._by_token:  # the parser takes one at a time anyway
            groups = [(parser.push((token,)), []) for token in new]
        else:
            groups = [(parser.push(new), [])]
        if isinstance(output, Completion):
            broken = parser.broken_calls
            events = parser.finish(finish_reason(output))
            entries = [] if self._logprobs is None else self._logprobs.release(parser, broken)
            groups.append((events, entries))
        return groups


def _delta_fields(events: Iterable[chat.Event]) -> dict[str, Any]:
    """Return the fields of one delta. Text, reasoning and the arguments of each call are joined."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        if isinstance(event, chat.Text):
            delta["content"] = delta.get("content", "") + event.text
        elif isinstance(event, chat.Reasoning):
            delta["reasoning"] = delta.get("reasoning", "") + event.text
        elif isinstance(event, chat.ToolCallStart):
            function = {"name": event.name, "arguments": ""}
            calls[event.index] = {
                "index": event.index,
                "id": event.id,
                "type": "function",
                "function": function,
            }
        elif isinstance(event, chat.ToolCallArguments):
            call = calls.setdefault(
                event.index, {"index": event.index, "function": {"arguments": ""}}
            )
            call["function"]["arguments"] += event.json_delta
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta
