"""One server over several processes of `jax.distributed`.

Each process has the same engine, for its own part of the devices, and a device waits for the others
in every step. So all have to make the same calls of their engines, in the same order, with the same
arguments. Clients talk to the first process alone: its `LeadingEngine` sends each call before it
makes it, and `follow` makes the calls that come. All else follows from the calls and from tokens,
which every process has: a stop text ends a row in each of them, by rules that go with the request.

Calls go through the key-value store that `jax.distributed` keeps in the first process. A broadcast
by the devices would be a device call that waits as long as no client asks: on a GPU it would keep
the device busy for hours, and on a CPU it would time out. A process that waits for a key sleeps.
Values are JSON and no pickles: whoever reaches the port of the store cannot run code by them.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # Orbax and `multihost_utils` have the store from here, too

from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from jaxspec.options import FieldError, Sampling
from jaxspec.serving.handle import RequestOutput
from jaxspec.serving.open_engine import warm_up
from jaxspec.serving.prompt_logprobs import PromptScorer, PromptScores
from jaxspec.serving.reply_end import EndRules, ReplyEnd
from jaxspec.text.images import ImagePatches
from jaxspec.tokenizer import Tokenizer

WAIT_MS = 600_000
"""Milliseconds of one wait for a call. Then the next wait begins."""
BEAT_S = 2.0
"""Seconds between two signs of life of a process."""
SILENCE_S = 15.0
"""Seconds without one after which the server fails. JAX ends its process `startup.HEARTBEAT_S` after the last
one, in a device call that waits for ever, and clients would get no reply."""


class LostProcess(RuntimeError):
    """One of the processes has ended, or makes other calls than the first one."""


class LeadingEngine:
    """The engine of the first process, for an `OpenEngine`. The others make each of its calls too."""

    def __init__(self, engine: Engine, scorer: PromptScorer):
        self._engine, self._scorer = engine, scorer
        self._store = _client()
        self._sent = 0

    def __repr__(self) -> str:
        """Return one line."""
        return f"LeadingEngine({jax.process_count()} processes, {self._engine!r})"

    @property
    def batch_size(self) -> int:
        """Number of its slots."""
        return self._engine.batch_size

    @property
    def num_running(self) -> int:
        """Number of requests that have a slot."""
        return self._engine.num_running

    @property
    def cache_usage(self) -> float:
        """The share of the caches that requests have, from 0 to 1."""
        return self._engine.cache_usage

    @property
    def num_preemptions(self) -> int:
        """Number of times that a request gave up its pages."""
        return self._engine.num_preemptions

    @property
    def is_idle(self) -> bool:
        """Return whether the completions of all requests were returned."""
        return self._engine.is_idle

    def validate(self, request: Request) -> Request:
        """Check a request, as `Engine.validate` does.

        Raises:
          FieldError: the engine refuses it, or other processes cannot have it.
        """
        if request.stop_at is not None and not isinstance(request.stop_at, ReplyEnd):
            raise FieldError("stop_at", "is no ReplyEnd, which several processes need")
        return self._engine.validate(request)

    def add(self, request: Request) -> Hashable:
        """Queue a request."""
        self._send("add", to_json(request))
        return self._engine.add(request)

    def cancel(self, id: Hashable) -> None:
        """End a request."""
        self._send("cancel", id)
        self._engine.cancel(id)

    def step(self) -> list[RequestOutput]:
        """Make a step, and return its events."""
        self._send("step")
        return self._engine.step()

    def warm_up(self) -> None:
        """Compile every program."""
        self._send("warm_up")
        self._engine.warm_up()

    def score(self, ids: tuple[int, ...]) -> PromptScores:
        """Return the log-probabilities of a prompt's tokens."""
        self._send("score", ids)
        return self._scorer(ids)

    def reset(self) -> None:
        """Refuse to go on after a failed step: it may have failed here alone.

        Raises:
          LostProcess: always.
        """
        raise LostProcess("a step failed, and other processes may be in another; start all again")

    def end(self) -> None:
        """Let the other processes end. No call may follow."""
        self._send("end")

    def _send(self, name: str, *args: Any) -> None:
        """Send a call. Each process has its own copy, which it deletes."""
        call = json.dumps([name, *args]).encode()
        for process in range(1, jax.process_count()):
            self._store.key_value_set_bytes(_key(process, self._sent), call)
        self._sent += 1


def follow(engine: Engine, scorer: PromptScorer, tokenizer: Tokenizer) -> None:
    """Make the calls of the first process, until it ends.

    Raises:
      Exception: a call failed. The first process knows it then, and the caller has to end this one
        without `jax.distributed.shutdown`, which would wait for the others.
    """
    with _signs_of_life() as tell:
        try:
            for name, *args in _calls():
                match name:
                    case "add":
                        request = from_json(args[0], tokenizer)
                        with contextlib.suppress(FieldError):  # the first process has the same one
                            engine.add(request)
                    case "cancel":
                        with contextlib.suppress(FieldError):  # the request is done
                            engine.cancel(args[0])
                    case "step":
                        engine.step()
                    case "warm_up":
                        warm_up(engine)
                    case "score":
                        scorer(tuple(args[0]))
                    case _:
                        raise LostProcess(f"the first process makes an unknown call, {name!r}")
        except Exception as error:
            tell(f"{type(error).__name__}: {error}".partition("\n")[0])
            raise


def watch(fail: Callable[[str], None]) -> None:
    """Watch the other processes in a thread, and call a function when one of them has ended."""
    store = _client()

    def look() -> None:
        newest = {process: ("", time.monotonic()) for process in range(1, jax.process_count())}
        while True:
            time.sleep(BEAT_S)
            now, beats = time.monotonic(), dict(store.key_value_dir_get("jaxspec/beats"))
            for process, (before, since) in newest.items():
                beat = beats.get(_beat(process), "")
                if beat and not beat.isdecimal():
                    return fail(f"process {process} has ended: {beat}")
                if beat != before:
                    newest[process] = beat, now
                elif now - since > SILENCE_S:
                    return fail(f"process {process} gave no sign of life for {SILENCE_S:.0f} s")

    threading.Thread(target=look, name="jaxspec-watch", daemon=True).start()


@contextlib.contextmanager
def _signs_of_life() -> Iterator[Callable[[str], None]]:
    """Give signs of life in a thread. Yield a function that tells the first process why they end."""
    store, is_over, key = _client(), threading.Event(), _beat(jax.process_index())

    def give() -> None:
        count = 0
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the first process has ended
            while not is_over.wait(BEAT_S if count else 0):
                count += 1
                store.key_value_set(key, str(count), allow_overwrite=True)

    def tell(reason: str) -> None:
        is_over.set()
        thread.join()
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            store.key_value_set(key, f"{reason} ", allow_overwrite=True)

    thread = threading.Thread(target=give, name="jaxspec-beats", daemon=True)
    thread.start()
    try:
        yield tell
    finally:
        is_over.set()


def _calls() -> Iterator[list[Any]]:
    """Yield the calls of the first process up to its end."""
    store, count = _client(), 0
    while True:
        key = _key(jax.process_index(), count)
        try:
            call = json.loads(store.blocking_key_value_get_bytes(key, WAIT_MS))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                continue
            raise LostProcess("the first process has ended") from error
        store.key_value_delete(key)
        if call == ["end"]:
            return
        count += 1
        yield call


def _client() -> Any:
    client = distributed.global_state.client
    assert client is not None
    return client


def _key(process: int, number: int) -> str:
    return f"jaxspec/calls/{process}/{number}"


def _beat(process: int) -> str:
    return f"jaxspec/beats/{process}"


# --- requests as JSON ----------------------------------------------------------------------------


def to_json(request: Request) -> dict[str, Any]:
    """Return all of a request, for `json.dumps`. Its `stop_at` is a `ReplyEnd`, or None."""
    values = {field.name: getattr(request, field.name) for field in dataclasses.fields(Request)}
    biases = list(request.sampling.logit_bias.items())
    end = request.stop_at
    return values | {
        "sampling": {**vars(request.sampling), "logit_bias": biases},
        "stop_at": dataclasses.asdict(end.rules) if isinstance(end, ReplyEnd) else None,
        "images": [
            {
                "pixels": _array_to_json(image.pixels),
                "positions": _array_to_json(image.positions),
                "num_tokens": image.num_tokens,
            }
            for image in request.images
        ],
    }


def from_json(values: Mapping[str, Any], tokenizer: Tokenizer) -> Request:
    """Return the request of which `to_json` returned this."""
    prompt, sampling, rules = tuple(values["prompt_ids"]), values["sampling"], values["stop_at"]
    if rules is not None:
        rules = EndRules(**{**rules, "stops": tuple(rules["stops"])})
    own: dict[str, Any] = {
        "prompt_ids": prompt,
        "stop_ids": tuple(values["stop_ids"]),
        "sampling": Sampling(**{**sampling, "logit_bias": dict(sampling["logit_bias"])}),
        "stop_at": None if rules is None else ReplyEnd(tokenizer, prompt, rules),
        "images": tuple(
            ImagePatches(
                _array_from_json(image["pixels"]),
                _array_from_json(image["positions"]),
                image["num_tokens"],
            )
            for image in values["images"]
        ),
    }
    return Request(**{**values, **own})


def _array_to_json(array: np.ndarray) -> list[Any]:
    return [array.dtype.str, array.shape, base64.b64encode(array.tobytes()).decode()]


def _array_from_json(values: list[Any]) -> np.ndarray:
    dtype, shape, data = values
    return np.frombuffer(base64.b64decode(data), dtype).reshape(shape)
