"""The end of a reply before its limit, as a client asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxspec.text import chat
from jaxspec.tokenizer import Tokenizer, stop_at_text


@dataclass(frozen=True)
class EndRules:
    """Rules that end a reply before its limit.

    Attributes:
      stops: texts.
      is_chat: whether they count in the answer alone, and not in reasoning and calls.
      calls: whether the reply may have tool calls, as for `parser_for`.
      first_call: whether the first complete call ends it.
    """

    stops: tuple[str, ...] = ()
    is_chat: bool = False
    calls: bool = False
    first_call: bool = False


class ReplyEnd:
    """The `Request.stop_at` of one request. It follows from `rules`, `prompt` and the tokens alone.

    So another process makes the same one from these, see `processes`.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], rules: EndRules):
        self.rules = rules
        self._functions: list[Callable[[Sequence[int]], int | None]] = []
        if rules.stops and rules.is_chat:
            of_answer = chat.StopText(tokenizer, prompt, rules.stops, calls=rules.calls)
            self._functions.append(of_answer)
        elif rules.stops:
            self._functions.append(stop_at_text(tokenizer, rules.stops))
        if rules.first_call:
            self._functions.append(chat.FirstCall(tokenizer, prompt))

    def __call__(self, ids: Sequence[int]) -> int | None:
        """Return the number of tokens to keep of the reply so far; None: it goes on."""
        ends = [end for function in self._functions if (end := function(ids)) is not None]
        return min(ends, default=None)


def reply_end(tokenizer: Tokenizer, prompt: Sequence[int], rules: EndRules) -> ReplyEnd | None:
    """Return the function that ends a reply; None if nothing does before its limit."""
    is_needed = rules.stops or rules.first_call
    return ReplyEnd(tokenizer, prompt, rules) if is_needed else None
