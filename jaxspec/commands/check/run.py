"""`jaxspec check`: does this drafter fit this target, and if not, why not?

A drafter with one convention wrong raises no error: its drafts are just never accepted. Read `run`. The
target continues some text greedily; then both models read it again (teacher forcing), and at every
position of the continuation the drafter drafts from the true context. Draft j is accepted there when
drafts 1 to j are the target's own next tokens, so what is counted is what decoding would accept. Other
readings of the drafter are held against the one in force on the same positions (`replay`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec import runtime
from jaxspec.commands.check import FEWEST_ROWS
from jaxspec.commands.check.conventions import in_force
from jaxspec.commands.check.lossless import Differing, first_differences
from jaxspec.commands.check.replay import Text, search
from jaxspec.commands.check.report import Findings
from jaxspec.commands.check.statistics import Comparison, Estimate, row_means
from jaxspec.commands.check.text import PromptSet
from jaxspec.commands.options import UsageError, told
from jaxspec.commands.startup import shorten
from jaxspec.engine import Engine
from jaxspec.loading import LoadedModel
from jaxspec.records import Drafting
from jaxspec.requests import Completion, Request


def decode_greedily(
    target: LoadedModel,
    drafter: LoadedModel | None,
    prompts: Sequence[tuple[int, ...]],
    new_tokens: int,
    **options: Any,
) -> list[Completion]:
    """Continue prompts, up to the checkpoint's own end."""
    stop_ids = target.generation.eos_token_ids if target.generation else ()
    requests = [Request(p, new_tokens, stop_ids=stop_ids) for p in prompts]
    engine = Engine.fitting(target, drafter, requests, **options)
    wrong = [
        f"row {i}: {told(error)}" for i, r in enumerate(requests) if (error := engine.check(r))
    ]
    if wrong:
        raise UsageError("\n".join(wrong))
    done = {event.id: event for event in engine.run(requests) if isinstance(event, Completion)}
    return [done[row] for row in range(len(requests))]


# --- the whole check ---------------------------------------------------------------------------------


def run(
    target: LoadedModel,
    drafter: LoadedModel,
    prompts: PromptSet,
    *,
    new_tokens: int,
    num_draft_tokens: int | None,
    floor: float,
    batch_size: int,
    say: Callable[[str], None] = lambda _: None,
) -> Findings:
    """Check a pair.

    Args:
      prompts: at least `FEWEST_ROWS`.
      say: called with what is being done.

    Raises:
      UsageError: the pair or the text cannot be checked.
    """
    batch_size = min(batch_size, len(prompts.ids))
    say("the target continues the text, with drafts")
    shared: dict[str, Any] = dict(batch_size=batch_size, programs=runtime.Programs())
    drafting = Drafting(num_draft_tokens)
    speculative = decode_greedily(
        target, drafter, prompts.ids, new_tokens, drafting=drafting, **shared
    )
    say("the same, without")
    plain = decode_greedily(target, None, prompts.ids, new_tokens, **shared)
    drafts = num_draft_tokens or drafter.graph.bind_abstract().default_draft_tokens

    enough = [i for i, c in enumerate(plain) if len(c.token_ids) > drafts]
    if len(enough) < FEWEST_ROWS:
        raise UsageError(
            f"{len(enough)} of {len(plain)} rows go on for more than the {drafts} tokens of a draft; check "
            f"needs {FEWEST_ROWS}: raise --new-tokens, or give other text with --text"
        )
    differences = first_differences(plain, speculative)
    kept = [*enough, *(i for i in differences if i not in enough)]
    text = Text.of([prompts.ids[i] for i in kept], [plain[i] for i in kept])
    judged = np.asarray([text.starts[n] - 1 + differences.get(i, 0) for n, i in enumerate(kept)])
    anchors = text.anchors(drafts)[: len(enough)]
    reading: dict[str, Any] = dict(num_draft_tokens=drafts, batch_size=batch_size, say=say)
    found = search(target, drafter, text, anchors, judged, **reading)
    differing = []
    for n, i in enumerate(kept):
        if i in differences:
            at = differences[i]
            tokens = (plain[i].token_ids[at], speculative[i].token_ids[at])
            where, logits = int(text.starts[n]) + at, found.replayed.logits[n]
            differing.append(Differing.of(i, where, tokens, logits, target.graph.dtype))
    by_position = [
        Estimate.of(row_means(found.accepted >= j, anchors)).within(0, 1)
        for j in range(1, drafts + 1)
    ]
    best_first = float(row_means(found.best_accepted >= 1, anchors).mean())
    return Findings(
        target=shorten(target.source),
        drafter=shorten(drafter.source),
        dtype=target.graph.dtype,
        device=jax.devices()[0].device_kind,
        text=prompts.origin,
        rows=len(enough),
        anchors=int(anchors.sum()),
        new_tokens=new_tokens,
        num_draft_tokens=drafts,
        batch_size=batch_size,
        replay_bytes=found.replayed.nbytes,
        conventions=in_force(target, drafter),
        by_position=by_position,
        accepted=Estimate.of(row_means(found.accepted, anchors)).within(0, drafts),
        acceptance_length=float(np.mean([n for c in speculative for n in c.acceptance_lengths])),
        rounds=found.rounds,
        differing=differing,
        floor=floor,
        problems=problems(by_position[0].mean, best_first, floor, found.changes, differing),
    )


def problems(
    first: float,
    best_first: float,
    floor: float,
    changes: Sequence[Comparison],
    differing: Sequence[Differing],
) -> list[str]:
    """Say what is wrong with a pair, and what to do.

    Args:
      first: share of first drafts that are accepted.
      best_first: the same after all `changes`.
    """
    found = []
    if first < floor:
        found.append(f"{first:.0%} of first drafts are accepted, below the floor of {floor:.0%}")
    if changes and best_first >= min(first, floor):
        found += [f"{c.name}: {c.difference.mean:+.2f} drafts a step; {c.fix}" for c in changes]
    elif found:
        found.append(
            "no other convention explains it: the drafter is another target's, its weights are damaged, or "
            "it was not trained for such text (give other text with --text)"
        )
    wrong = [d for d in differing if not d.near_tie]
    if wrong:
        d = wrong[0]
        found.append(
            f"rows that differ from plain decoding by more than a near-tie: {len(wrong)}, the first at "
            f"position {d.position} of row {d.row}; this is a bug of ours or of the device, whatever the drafter; "
            "please report it"
        )
    return found
