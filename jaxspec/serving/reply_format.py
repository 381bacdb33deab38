"""From tokens to what a reply says: text, reasoning, tool calls, log-probabilities, usage.

Read `TextChoice`, then `ChatChoice`. Both take all tokens so far and return what is new, so a reply in one piece and a
stream are made by the same lines. Under speculation several tokens come at once; neither notices.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxspec.engine.request import Completion, Update
from jaxspec.serving.parse_request import ParsedRequest
from jaxspec.serving.prompt_logprobs import Best, PromptScores
from jaxspec.serving.verify_steps import StepSplitter
from jaxspec.text import chat
from jaxspec.tokenizer import TextStream, Tokenizer

LEAST_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON lacks."""


@dataclass
class Usage:
    """Counts over the choices of a reply."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    accepted_tokens: int = 0
    drafted_tokens: int = 0

    def add(self, done: Completion, reasoning_tokens: int) -> None:
        """Count a completion. Of accepted drafts, only those count that the reply shows."""
        split = StepSplitter().push(len(done.token_ids), done.acceptance_lengths)
        self.reasoning_tokens += reasoning_tokens
        self.completion_tokens += len(done.token_ids)
        self.cached_tokens += done.cached_tokens
        self.accepted_tokens += sum(accepted for _, accepted in split)
        self.drafted_tokens += sum(done.verify_lengths)

    def to_json(self) -> dict[str, Any]:
        """Return it as the protocol has it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": self.details,
        }

    @property
    def details(self) -> dict[str, int]:
        """What the new tokens were, as the protocol has it."""
        return {
            "reasoning_tokens": self.reasoning_tokens,
            "accepted_prediction_tokens": self.accepted_tokens,
            "rejected_prediction_tokens": self.drafted_tokens - self.accepted_tokens,
        }


def finish_reason(done: Completion) -> str:
    """Return why a completion ended, in the protocol's words."""
    return "stop" if done.finish_reason == "stop" else "length"


def stop_reason(
    done: Completion, tokenizer: Tokenizer, wish: ParsedRequest, asked_ids: Sequence[int]
) -> int | str | None:
    """Return which of the request's own stops ended a completion: an id, a text, or None."""
    if done.finish_reason != "stop":
        return None
    text = tokenizer.decode(done.token_ids) if wish.stops else ""
    found = [(text.index(stop), stop) for stop in wish.stops if stop in text]
    if found:
        return min(found)[1]
    return done.token_ids[-1] if done.token_ids[-1:] and done.token_ids[-1] in asked_ids else None


# --- log-probabilities -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Logprobs:
    """Shows log-probabilities as the two routes have them.

    Attributes:
      top: best tokens beside each.
    """

    tokenizer: Tokenizer
    top: int

    def text_form(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float | None],
        best: Sequence[Best | None],
        offset: int,
    ) -> dict[str, Any]:
        """Return those of some tokens as /v1/completions has them.

        Args:
          offset: characters of the text before them.
        """
        tokens = [self._token(i) for i in ids]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [None if x is None else _number(x) for x in logprobs],
            "top_logprobs": [None if b is None else self._by_text(b[: self.top]) for b in best]
            if self.top
            else None,
            "text_offset": offsets,
        }

    def chat_form(self, event: Update | Completion, begin: int) -> dict[str, Any]:
        """Return those of the tokens from `begin` on, as /v1/chat/completions has them."""
        return {"content": [self.entry(event, i) for i in range(begin, len(event.token_ids))]}

    def entry(self, event: Update | Completion, place: int) -> dict[str, Any]:
        """Return those of one token, with the best ones in its place."""
        best = event.top_logprobs[place][: self.top] if event.top_logprobs else ()
        one = self._entry(event.token_ids[place], (event.logprobs or ())[place])
        return {**one, "top_logprobs": [self._entry(i, x) for i, x in best]}

    def of_prompt(self, scores: PromptScores) -> list[dict[str, Any] | None]:
        """Return those of a prompt as `prompt_logprobs` has them, by token id: its own, and the best."""
        shown: list[dict[str, Any] | None] = [None]
        best = scores.top_logprobs or ((),) * len(scores.logprobs)
        for own, logprob, row in zip(scores.ids[1:], scores.logprobs, best, strict=True):
            of_id = {own: logprob, **dict(row[: self.top])}
            shown.append(
                {
                    str(i): {"logprob": _number(x), "decoded_token": self._token(i)}
                    for i, x in of_id.items()
                }
            )
        return shown

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        token = self._token(token_id)
        spelt = list(self.tokenizer.bytes_of(token_id, token))
        return {"token": token, "logprob": _number(logprob), "bytes": spelt}

    def _by_text(self, best: Best) -> dict[str, float]:
        """Return tokens by their text. Of several with one text, such as parts of characters, the best one counts."""
        found: dict[str, float] = {}
        for token_id, logprob in best:
            found.setdefault(self._token(token_id), _number(logprob))
        return found

    def _token(self, token_id: int) -> str:
        return self.tokenizer.backend.decode([token_id], skip_special_tokens=False)


def _number(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB) if logprob == logprob else LEAST_LOGPROB


class TextLogprobs:
    """Finds the log-probabilities of the tokens of the text, among those of reasoning and of calls."""

    def __init__(self, tokenizer: Tokenizer, wish: ParsedRequest):
        """Begin with a reply."""
        self._logprobs = Logprobs(tokenizer, wish.top_logprobs or 0)
        self._stop_ids = wish.requests[0].all_stop_ids
        self._held: list[dict[str, Any]] = []  # of tokens whose text is held back

    def read(
        self, parser: chat.Parser, event: Update | Completion, begin: int
    ) -> Iterator[tuple[list[chat.Event], list[dict[str, Any]]]]:
        """Let a parser read the tokens from `begin` on; yield its events, and the entries of their text."""
        for place, token_id in enumerate(event.token_ids[begin:], begin):
            before = parser.text_tokens
            events = parser.push((token_id,))
            is_text = parser.text_tokens > before
            if is_text and token_id not in self._stop_ids:
                self._held.append(self._logprobs.entry(event, place))
            tells = any(isinstance(e, chat.Text) for e in events)
            yield events, self.rest() if tells else []
            if not is_text:
                self._held = []  # newlines before a marker, which are no text

    def rest(self) -> list[dict[str, Any]]:
        """Return the entries that are left."""
        held, self._held = self._held, []
        return held


# --- choices -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Delta:
    """What is new of a choice.

    Attributes:
      delta: what the protocol shows of it; empty where no text is certain yet.
      logprobs: of the tokens that came, where the request asks.
      token_ids: those that came.
      reason: why it is over; None while it goes on.
      of_tokens: what each token added to the delta, if the request asks for steps.
      rest: what the delta has beyond that: text that was held back until the end.
    """

    delta: dict[str, Any]
    token_ids: tuple[int, ...]
    logprobs: dict[str, Any] | None = None
    reason: str | None = None
    of_tokens: tuple[dict[str, Any], ...] = ()
    rest: dict[str, Any] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show yet."""
        is_silent = not self.delta and self.logprobs is None and self.reason is None
        return is_silent and not self.of_tokens


class TextChoice:
    """A choice of /v1/completions: plain text."""

    def __init__(self, tokenizer: Tokenizer, wish: ParsedRequest, index: int):
        self.index = index
        self._prompt = wish.prompt_of(index) if wish.echo else None
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer, wish.stops)
        top = wish.top_logprobs
        self._logprobs = None if top is None else Logprobs(tokenizer, top)
        self._by_token = wish.steps
        self._seen = self._characters = 0

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of reasoning; a text has none."""
        return 0

    def echo(self, scores: PromptScores | None) -> Delta | None:
        """Return the prompt, which comes before all else; None where it is not shown."""
        if self._prompt is None:
            return None
        logprobs = None
        if self._logprobs is not None and scores is not None:
            best = (None, *scores.top_logprobs)
            logprobs = self._logprobs.text_form(scores.ids, (None, *scores.logprobs), best, 0)
            self._characters = sum(map(len, logprobs["tokens"]))
        return Delta({"text": self._tokenizer.decode(self._prompt)}, (), logprobs)

    def push(self, event: Update | Completion) -> Delta:
        """Take all tokens so far, and return what is new."""
        is_done = isinstance(event, Completion)
        ids, begin, self._seen = event.token_ids, self._seen, len(event.token_ids)
        pieces: list[str] = []
        if self._by_token:
            pieces = [self._stream.push(ids[:end]) for end in range(begin + 1, len(ids) + 1)]
        rest = self._stream.finish(ids) if is_done else self._stream.push(ids)
        text = "".join(pieces) + rest
        logprobs = None
        if self._logprobs is not None and (begin < self._seen or is_done):
            logprobs = self._logprobs.text_form(
                ids[begin:],
                (event.logprobs or ())[begin:],
                (event.top_logprobs or ())[begin:],
                self._characters,
            )
            self._characters += sum(map(len, logprobs["tokens"]))
        return Delta(
            {"text": text} if text else {},
            ids[begin:],
            logprobs,
            finish_reason(event) if isinstance(event, Completion) else None,
            tuple({"text": piece} if piece else {} for piece in pieces),
            {"text": rest} if rest else {},
        )


def joined(first: Delta | None, then: Delta) -> Delta:
    """Return two pieces of a text as one."""
    if first is None:
        return then
    text = first.delta["text"] + then.delta.get("text", "")
    logprobs = first.logprobs
    if logprobs is not None and then.logprobs is not None:
        more = then.logprobs
        logprobs = {k: v if v is None else [*v, *more[k]] for k, v in logprobs.items()}
    return Delta({"text": text}, then.token_ids, logprobs, then.reason)


class ChatChoice:
    """A choice of /v1/chat/completions: text, reasoning and tool calls, told apart by token id."""

    def __init__(self, tokenizer: Tokenizer, wish: ParsedRequest, index: int):
        self.index = index
        self._parser = chat.parser_for(
            tokenizer, wish.prompt_of(index), calls=wish.tools.calls, stop_texts=wish.stops
        )
        top = wish.top_logprobs
        self._logprobs = None if top is None else Logprobs(tokenizer, top)
        self._by_token = wish.steps
        self._seen = 0

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of reasoning so far."""
        return self._parser.reasoning_tokens

    def push(self, event: Update | Completion) -> Delta:
        """Take all tokens so far, and return what is new."""
        begin, self._seen = self._seen, len(event.token_ids)
        new = event.token_ids[begin:]
        told: list[list[chat.Event]] = []
        if self._by_token:  # the parser takes one at a time anyway
            told = [self._parser.push((token,)) for token in new]
            new = ()
        rest = self._parser.push(new)
        reason = None
        if isinstance(event, Completion):
            rest += self._parser.finish(finish_reason(event))
            reason = self._parser.finish_reason
        logprobs = None
        if self._logprobs is not None and (begin < self._seen or reason):
            logprobs = self._logprobs.chat_form(event, begin)
        delta = _delta([*itertools.chain(*told), *rest])
        of_tokens = tuple(map(_delta, told))
        return Delta(delta, event.token_ids[begin:], logprobs, reason, of_tokens, _delta(rest))

    def message(self, event: Completion) -> tuple[dict[str, Any], Delta]:
        """Take a whole reply, and return its message and the rest."""
        events = [*self._parser.push(event.token_ids)]
        events += self._parser.finish(finish_reason(event))
        logprobs = None if self._logprobs is None else self._logprobs.chat_form(event, 0)
        piece = Delta({}, event.token_ids, logprobs, self._parser.finish_reason)
        return chat.message_of(events), piece


def _delta(events: Iterable[chat.Event]) -> dict[str, Any]:
    """Return events as one delta. Pieces of text, of reasoning and of each call are joined."""
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
