"""What the target makes of prompts: the first text of a check, and a second one.

Read `decode_greedily`, which makes the first. `further` makes the second: the target draws how each prompt goes on,
several times, and continues that greedily. Drawn tokens are context alone; drafts are judged after them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxspec.commands.check.replay import Text
from jaxspec.commands.options import UsageError, told
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Completion, Request
from jaxspec.options import Sampling
from jaxspec.weights.loading import LoadedModel

DRAWS = 3  # rows of the second text for each prompt

MOST_DRAWN = 512
"""Tokens that are drawn at most so that rows of the second text are longer than the target's window."""


def decode_greedily(
    target: LoadedModel,
    drafter: LoadedModel | None,
    prompts: Sequence[tuple[int, ...]],
    new_tokens: int,
    **options: Any,
) -> list[Completion]:
    """Continue prompts, up to the checkpoint's own end."""
    stop_ids = stop_ids_of(target)
    requests = [Request(p, new_tokens, stop_ids=stop_ids) for p in prompts]
    return _decode(target, drafter, requests, **options)


def further(
    target: LoadedModel,
    prompts: Sequence[tuple[int, ...]],
    new_tokens: int,
    *,
    room: int,
    **options: Any,
) -> Text | None:
    """Make the second text: `DRAWS` rows for each prompt, after each other.

    Args:
      room: positions that must be left after a row.
      options: of the engine.

    Returns:
      The text; None if the model has no room for rows that go on further than those of the first.
    """
    longest = max(map(len, prompts))
    drawn = _drawn_tokens(target, min(map(len, prompts)), new_tokens)
    drawn = min(drawn, target.config.max_positions - longest - new_tokens - room)
    if drawn < new_tokens:  # what is judged would be the first text again
        return None
    sampling, stop_ids = Sampling(temperature=1.0), stop_ids_of(target)
    requests = [
        Request(p, drawn, sampling, stop_ids, seed=draw) for p in prompts for draw in range(DRAWS)
    ]
    begun = [
        _row(r, c)
        for r, c in zip(requests, _decode(target, None, requests, **options), strict=True)
    ]
    done = decode_greedily(target, None, begun, new_tokens, **options)
    # A row of which nothing was drawn is the first text.
    kept = [
        c if row != r.prompt_ids else dataclasses.replace(c, token_ids=())
        for c, row, r in zip(done, begun, requests, strict=True)
    ]
    return Text.of(begun, kept)


def stop_ids_of(target: LoadedModel) -> tuple[int, ...]:
    """Return the ids that the checkpoint ends with."""
    return target.generation.eos_token_ids if target.generation else ()


def _drawn_tokens(target: LoadedModel, shortest: int, new_tokens: int) -> int:
    """Return how many tokens to draw: as many as take the shortest prompt over the window, if they are not too many."""
    windows = [layer.window for layer in target.config.layers if layer.window is not None]
    over = min(windows, default=0) - shortest
    return over if new_tokens < over <= MOST_DRAWN else new_tokens


def _row(request: Request, done: Completion) -> tuple[int, ...]:
    """Return a prompt with what was drawn; half of that if it came to an end, so that there is more to say."""
    ids = done.token_ids
    return request.prompt_ids + (ids[: len(ids) // 2] if done.finish_reason == "stop" else ids)


def _decode(
    target: LoadedModel, drafter: LoadedModel | None, requests: Sequence[Request], **options: Any
) -> list[Completion]:
    engine = Engine.fitting(target, drafter, requests, **options)
    wrong = [
        f"row {i}: {told(error)}" for i, r in enumerate(requests) if (error := engine.check(r))
    ]
    if wrong:
        raise UsageError("\n".join(wrong))
    done = {event.id: event for event in engine.run(requests) if isinstance(event, Completion)}
    return [done[row] for row in range(len(requests))]
