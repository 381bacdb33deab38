"""Which tokens of a reply came in one verify step: the drafts that were accepted, and the target's own token.

A request asks for it by `return_steps`. The page at / colours text by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.engine.request import Completion, Update


class StepSplitter:
    """Splits the tokens of a reply into those of each step, while they come."""

    def __init__(self) -> None:
        self._tokens = self._steps = 0  # that were told

    def push(self, num_tokens: int, acceptance_lengths: Sequence[int]) -> list[tuple[int, int]]:
        """Take what a reply has so far, and say of each new step: its tokens, and the accepted drafts among them.

        The first token comes from the prompt, and counts as a step of its own without drafts. A step that a stop or
        the limit cut has its first tokens only.
        """
        found = []
        while self._tokens < num_tokens:
            length = 1
            if self._tokens and self._steps < len(acceptance_lengths):
                length = acceptance_lengths[self._steps]
                self._steps += 1
            size = min(length, num_tokens - self._tokens)
            found.append((size, min(length - 1, size)))
            self._tokens += size
        return found


class Steps:
    """Tells in which steps the tokens of a choice came, in the form that events of a stream have.

    Args:
      depth: drafts that a step may accept.
    """

    def __init__(self, depth: int):
        self._depth, self._split = depth, StepSplitter()
        self._told = self._steps = 0

    def push(
        self,
        event: Update | Completion,
        of_tokens: Sequence[Mapping[str, Any]],
        rest: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the steps that are new.

        Args:
          of_tokens: what each new token of the event added to the reply.
          rest: what the reply has beyond that: text that was held back until its end.
        """
        steps, ids = [], event.token_ids
        for size, accepted in self._split.push(len(ids), event.acceptance_lengths):
            new, of_tokens = of_tokens[:size], of_tokens[size:]
            begin, self._told = self._told, self._told + size
            tokens = [{"id": i, **said} for i, said in zip(ids[begin:], new, strict=False)]
            drafted = 0
            if begin and self._steps < len(event.verify_lengths):
                drafted = min(event.verify_lengths[self._steps], self._depth)
                self._steps += 1
            steps.append({"drafted": drafted, "accepted": accepted, "tokens": tokens})
        return {"steps": steps, **({"rest": rest} if rest else {})}
