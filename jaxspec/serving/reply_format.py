"""Format of replies: text, reasoning, tool calls, log-probabilities and usage, from tokens.

Read `TextChoice`, then `ChatChoice`. Both take all tokens so far and return a `Delta`. Replies in
one piece and streams use the same code. It does not matter how many tokens come at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxspec.engine.request import Completion
from jaxspec.serving.handle import RequestOutput
from jaxspec.serving.parse_request import ParsedRequest
from jaxspec.serving.prompt_logprobs import PromptScores, TopLogprobs
from jaxspec.serving.verify_steps import StepSplitter
from jaxspec.text import chat
from jaxspec.tokenizer import TextStream, Tokenizer

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks."""


@dataclass
class Usage:
    """Token counts of a reply, over all its choices."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    accepted_tokens: int = 0
    drafted_tokens: int = 0

    def add(self, completion: Completion, reasoning_tokens: int) -> None:
        """Count a completion. Accepted drafts that a stop or the limit cut do not count."""
        ids = completion.token_ids
        steps = StepSplitter().push(len(ids), completion.acceptance_lengths)
        self.reasoning_tokens += reasoning_tokens
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
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": self.details,
        }

    @property
    def details(self) -> dict[str, int]:
        """Counts of new tokens by kind, as in `completion_tokens_details`."""
        return {
            "reasoning_tokens": self.reasoning_tokens,
            "accepted_prediction_tokens": self.accepted_tokens,
            "rejected_prediction_tokens": self.drafted_tokens - self.accepted_tokens,
        }


def finish_reason(completion: Completion) -> str:
    """Return the protocol's `finish_reason` of a completion."""
    return "stop" if completion.finish_reason == "stop" else "length"


def stop_reason(
    completion: Completion,
    tokenizer: Tokenizer,
    parsed: ParsedRequest,
    stop_token_ids: Sequence[int],
) -> int | str | None:
    """Return the stop id or stop text of the request that ended a completion, or None.

    Args:
      stop_token_ids: the request's stop ids, without the checkpoint's.
    """
    if completion.finish_reason != "stop":
        return None
    ids = completion.token_ids
    text = tokenizer.decode(ids) if parsed.stops else ""
    matches = [(text.index(stop), stop) for stop in parsed.stops if stop in text]
    if matches:
        return min(matches)[1]
    return ids[-1] if ids and ids[-1] in stop_token_ids else None


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
        offset: int,
    ) -> dict[str, Any]:
        """Return `logprobs` of /v1/completions.

        Args:
          offset: number of characters in the text before the tokens.
        """
        tokens = [self._token(i) for i in ids]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [None if x is None else _number(x) for x in logprobs],
            "top_logprobs": [
                None if t is None else self._by_text(t[: self.top]) for t in top_logprobs
            ]
            if self.top
            else None,
            "text_offset": offsets,
        }

    def chat_logprobs(self, output: RequestOutput, begin: int) -> dict[str, Any]:
        """Return `logprobs` of /v1/chat/completions, for the tokens from `begin` on."""
        return {"content": [self.entry(output, i) for i in range(begin, len(output.token_ids))]}

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


class TextLogprobs:
    """Selects the log-probabilities of text tokens, without reasoning and tool calls."""

    def __init__(self, tokenizer: Tokenizer, parsed: ParsedRequest):
        """Start at the beginning of a reply."""
        self._formatter = LogprobsFormatter(tokenizer, parsed.top_logprobs or 0)
        self._stop_ids = parsed.engine_requests[0].all_stop_ids
        self._held: list[dict[str, Any]] = []  # of tokens whose text is held back

    def push(
        self, parser: chat.Parser, output: RequestOutput, begin: int
    ) -> Iterator[tuple[list[chat.Event], list[dict[str, Any]]]]:
        """Parse the tokens from `begin` on; yield events, and the entries of their text."""
        for index, token_id in enumerate(output.token_ids[begin:], begin):
            before = parser.text_tokens
            events = parser.push((token_id,))
            is_text = parser.text_tokens > before
            if is_text and token_id not in self._stop_ids:
                self._held.append(self._formatter.entry(output, index))
            has_text = any(isinstance(e, chat.Text) for e in events)
            yield events, self.rest() if has_text else []
            if not is_text:
                self._held = []  # newlines before a marker are no text

    def rest(self) -> list[dict[str, Any]]:
        """Return the entries of the text that was held back."""
        held, self._held = self._held, []
        return held


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
    """A choice of /v1/completions, which is plain text."""

    def __init__(self, tokenizer: Tokenizer, parsed: ParsedRequest, index: int):
        self.index = index
        self._prompt = parsed.prompt_of(index) if parsed.echo else None
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer, parsed.stops)
        top = parsed.top_logprobs
        self._formatter = None if top is None else LogprobsFormatter(tokenizer, top)
        self._by_token = parsed.return_steps
        self._seen = self._characters = 0

    @property
    def reasoning_tokens(self) -> int:
        """Number of reasoning tokens; plain text has none."""
        return 0

    def echo(self, scores: PromptScores | None) -> Delta | None:
        """Return the prompt as the choice's first delta, or None if the request has no `echo`."""
        if self._prompt is None:
            return None
        logprobs = None
        if self._formatter is not None and scores is not None:
            top = (None, *scores.top_logprobs)
            logprobs = self._formatter.completion_logprobs(
                scores.ids, (None, *scores.logprobs), top, 0
            )
            self._characters = sum(map(len, logprobs["tokens"]))
        return Delta({"text": self._tokenizer.decode(self._prompt)}, (), logprobs)

    def push(self, output: RequestOutput) -> Delta:
        """Return the content that is new since the last call. `output` has all tokens so far."""
        is_done = isinstance(output, Completion)
        ids, begin, self._seen = output.token_ids, self._seen, len(output.token_ids)
        pieces: list[str] = []
        if self._by_token:
            pieces = [self._stream.push(ids[:end]) for end in range(begin + 1, len(ids) + 1)]
        rest = self._stream.finish(ids) if is_done else self._stream.push(ids)
        text = "".join(pieces) + rest
        logprobs = None
        if self._formatter is not None and (begin < self._seen or is_done):
            logprobs = self._formatter.completion_logprobs(
                ids[begin:],
                (output.logprobs or ())[begin:],
                (output.top_logprobs or ())[begin:],
                self._characters,
            )
            self._characters += sum(map(len, logprobs["tokens"]))
        return Delta(
            {"text": text} if text else {},
            ids[begin:],
            logprobs,
            finish_reason(output) if isinstance(output, Completion) else None,
            tuple({"text": piece} if piece else {} for piece in pieces),
            {"text": rest} if rest else {},
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
    """A choice of /v1/chat/completions: text, reasoning and tool calls."""

    def __init__(self, tokenizer: Tokenizer, parsed: ParsedRequest, index: int):
        self.index = index
        self._parser = chat.parser_for(
            tokenizer, parsed.prompt_of(index), calls=parsed.tools.calls, stop_texts=parsed.stops
        )
        top = parsed.top_logprobs
        self._formatter = None if top is None else LogprobsFormatter(tokenizer, top)
        self._by_token = parsed.return_steps
        self._seen = 0

    @property
    def reasoning_tokens(self) -> int:
        """Number of reasoning tokens so far."""
        return self._parser.reasoning_tokens

    def push(self, output: RequestOutput) -> Delta:
        """Return the content that is new since the last call. `output` has all tokens so far."""
        begin, self._seen = self._seen, len(output.token_ids)
        new = output.token_ids[begin:]
        by_token: list[list[chat.Event]] = []
        if self._by_token:  # the parser takes one at a time anyway
            by_token = [self._parser.push((token,)) for token in new]
            new = ()
        rest = self._parser.push(new)
        reason = None
        if isinstance(output, Completion):
            rest += self._parser.finish(finish_reason(output))
            reason = self._parser.finish_reason
        logprobs = None
        if self._formatter is not None and (begin < self._seen or reason):
            logprobs = self._formatter.chat_logprobs(output, begin)
        return Delta(
            _delta_fields([*itertools.chain(*by_token), *rest]),
            output.token_ids[begin:],
            logprobs,
            reason,
            tuple(map(_delta_fields, by_token)),
            _delta_fields(rest),
        )

    def message(self, completion: Completion) -> tuple[dict[str, Any], Delta]:
        """Return the message of a whole reply, and a delta with all else."""
        events = [*self._parser.push(completion.token_ids)]
        events += self._parser.finish(finish_reason(completion))
        logprobs = None
        if self._formatter is not None:
            logprobs = self._formatter.chat_logprobs(completion, 0)
        delta = Delta({}, completion.token_ids, logprobs, self._parser.finish_reason)
        return chat.message_of(events), delta


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
