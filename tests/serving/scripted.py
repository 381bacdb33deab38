"""Engine that gives replies of the test's, in steps as in speculative decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import cycle

from jaxspec.engine.request import Completion, Request, Update
from tests.serving.fake_engine import FakeEngine

LENGTHS = (4, 1, 3, 2)
"""Tokens that the engine's steps commit, in turn; the first token comes from the prompt."""
VERIFIED = 3
"""Drafts that each step verifies."""
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if tools %}{{ tools | length }} tools{% endif %}"
    "{% if enable_thinking is defined %}thinking {{ enable_thinking }}{% endif %}"
    "<|im_start|>assistant\n"
)


class ScriptedEngine(FakeEngine):
    """Gives each request the next of its replies, a step at a time. Token `i` has the log-probability -i.

    Attributes:
      replies: token ids of each.
      asked: the requests that came.
    """

    def __init__(self, replies: Iterable[list[int]] = ()) -> None:
        super().__init__()
        self.replies = list(replies)
        self.asked: list[Request] = []

    def step(self) -> list[Update | Completion]:
        self._own()
        self.in_step.set()
        self.gate.wait()
        self.in_step.clear()
        events: list[Update | Completion] = list(self.ended)
        self.ended.clear()
        while self.waiting and len(self.running) < self.batch_size:
            request = self.waiting.pop(0)
            self.asked.append(request)
            self.running[request.id] = request, 0
        for name, (request, steps) in list(self.running.items()):
            reply = self.replies[self.asked.index(request) % len(self.replies)]
            lengths = tuple(length for length, _ in zip(cycle(LENGTHS), range(steps), strict=False))
            count = min(1 + sum(lengths), len(reply), request.max_new_tokens)
            tokens = tuple(reply[:count])
            keep = request.stop_at(tokens) if request.stop_at else None
            tokens = tokens[:keep]
            self.running[name] = request, steps + 1
            verified = (VERIFIED,) * len(lengths)
            asks = request.sampling.logprobs
            logprobs = tuple(-float(i) for i in range(len(tokens))) if asks else None
            events.append(Update(name, tokens, lengths, verified, logprobs))
            if keep is not None or count in (len(reply), request.max_new_tokens):
                del self.running[name]
                reason = "length" if keep is None and count < len(reply) else "stop"
                done = Completion(name, tokens, reason, lengths, logprobs=logprobs)
                events.append(dataclasses.replace(done, verify_lengths=verified))
        return events

    def cancel(self, id: object) -> None:
        if id in self.running:
            del self.running[id]
            self.ended.append(Completion(id, finish_reason="cancelled"))
            return
        super().cancel(id)
