"""Engine without a model. A token is a function of the prompt and the token's index."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Hashable
from typing import Any

from jaxspec.engine.request import Completion, Request, Update
from jaxspec.options import FieldError


def token(request: Request, index: int) -> int:
    return hash((request.prompt_ids, index)) % 1000


def answer(request: Request, count: int | None = None) -> tuple[int, ...]:
    count = request.max_new_tokens if count is None else count
    return tuple(token(request, index) for index in range(count))


class FakeEngine:
    """Engine that gives two tokens a step to each request that has a slot.

    Attributes:
      gate: a step waits for it, as if the device worked.
      failure: is called in each step, and may raise.
    """

    def __init__(self, batch_size: int = 2) -> None:
        self.batch_size = batch_size
        self.gate = threading.Event()
        self.gate.set()
        self.in_step = threading.Event()
        self.failure: Callable[[FakeEngine], None] = lambda engine: None
        self.thread: int | None = None
        self.admitted: list[Hashable] = []
        self.warmed_up = False
        self.reset()

    def reset(self) -> None:
        self.waiting: list[Request] = []
        self.running: dict[Hashable, tuple[Request, int]] = {}
        self.ended: list[Completion] = []

    def _own(self) -> None:
        """Assert that one thread only uses the engine."""
        self.thread = self.thread or threading.get_ident()
        assert threading.get_ident() == self.thread

    @property
    def num_preemptions(self) -> int:
        return 0

    @property
    def cache_usage(self) -> float:
        return len(self.running) / self.batch_size

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.running or self.ended)

    def validate(self, request: Request) -> Request:
        if not request.prompt_ids:
            raise FieldError("prompt_ids", "is empty")
        return request

    def warm_up(self) -> None:
        self._own()
        self.gate.wait()
        self.warmed_up = True

    def add(self, request: Request) -> Any:
        self._own()
        names = [r.id for r in self.waiting] + list(self.running)
        assert request.id not in names
        self.waiting.append(request)
        self.waiting.sort(key=lambda r: r.priority)
        return request.id

    def cancel(self, id: Hashable) -> None:
        self._own()
        for request in self.waiting:
            if request.id == id:
                self.waiting.remove(request)
                self.ended.append(Completion(id, finish_reason="cancelled"))
                return
        if id not in self.running:
            raise FieldError("id", "belongs to no request")
        request, count = self.running.pop(id)
        self.ended.append(Completion(id, answer(request, count), "cancelled"))

    def step(self) -> list[Update | Completion]:
        self._own()
        self.in_step.set()
        self.gate.wait()
        self.in_step.clear()
        self.failure(self)
        events: list[Update | Completion] = list(self.ended)
        self.ended.clear()
        while self.waiting and len(self.running) < self.batch_size:
            request = self.waiting.pop(0)
            self.admitted.append(request.id)
            self.running[request.id] = request, 0
        for name, (request, count) in list(self.running.items()):
            count = min(count + 2, request.max_new_tokens)
            tokens = answer(request, count)
            self.running[name] = request, count
            try:
                keep = request.stop_at(tokens) if request.stop_at else None
            except Exception as error:
                del self.running[name]
                message = f"stop_at raised {type(error).__name__}"
                events.append(Completion(name, tokens, "error", error=message))
                continue
            if keep is not None:
                tokens = tokens[:keep]
            asks = request.sampling.logprobs
            logprobs = (-1.0,) * len(tokens) if asks else None
            events.append(Update(name, tokens, logprobs=logprobs))
            if keep is not None or count == request.max_new_tokens:
                del self.running[name]
                reason = "length" if keep is None else "stop"
                lengths = (2,) * (len(tokens) // 2)
                done = Completion(name, tokens, reason, lengths, logprobs=logprobs)
                events.append(dataclasses.replace(done, verify_lengths=(1,) * len(lengths)))
        return events
