"""Verify steps of a reply: the accepted drafts of each step, and the target's own token after them.

The field `return_steps` asks for them. The chat page colours text by them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.serving.handle import RequestOutput


class StepSplitter:
    """Splits the tokens of a growing reply into verify steps."""

    def __init__(self) -> None:
        self._tokens = self._steps = 0  # already returned

    def push(self, num_tokens: int, acceptance_lengths: Sequence[int]) -> list[tuple[int, int]]:
        """Return (tokens, accepted drafts among them) of each new step.

        The first token comes from the prompt, and counts as a step without drafts. A stop or the
        limit may cut the last step.

        Args:
          num_tokens: tokens of the reply so far.
          acceptance_lengths: tokens that each step so far has committed.
        """
        steps = []
        while self._tokens < num_tokens:
            length = 1
            if self._tokens and self._steps < len(acceptance_lengths):
                length = acceptance_lengths[self._steps]
                self._steps += 1
            size = min(length, num_tokens - self._tokens)
            steps.append((size, min(length - 1, size)))
            self._tokens += size
        return steps


class StepFormatter:
    """Formats the verify steps of a choice for the events of a stream.

    Args:
      depth: largest number of drafts that a step may accept.
    """

    def __init__(self, depth: int):
        self._depth, self._splitter = depth, StepSplitter()
        self._tokens = self._steps = 0  # already returned

    def push(
        self,
        output: RequestOutput,
        token_deltas: Sequence[Mapping[str, Any]],
        rest: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the new steps as JSON.

        Args:
          token_deltas: fields that each new token of the output added to the reply.
          rest: fields that the reply has beyond them: text that was held back until its end.
        """
        steps, ids = [], output.token_ids
        for size, accepted in self._splitter.push(len(ids), output.acceptance_lengths):
            deltas, token_deltas = token_deltas[:size], token_deltas[size:]
            begin, self._tokens = self._tokens, self._tokens + size
            tokens = [{"id": i, **delta} for i, delta in zip(ids[begin:], deltas, strict=False)]
            drafted = 0
            if begin and self._steps < len(output.verify_lengths):
                drafted = min(output.verify_lengths[self._steps], self._depth)
                self._steps += 1
            steps.append({"drafted": drafted, "accepted": accepted, "tokens": tokens})
        return {"steps": steps, **({"rest": rest} if rest else {})}
