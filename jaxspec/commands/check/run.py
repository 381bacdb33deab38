"""`jaxspec check`: does this drafter fit this target, and if not, why not?

A drafter with one convention wrong raises no error: its drafts are just never accepted. Read `run`. The
target continues some text greedily; then both models read it again (teacher forcing), and at every
position of the continuation the drafter drafts from the true context. Draft j is accepted there when
drafts 1 to j are the target's own next tokens, so what is counted is what decoding would accept. Other
readings of the drafter are held against the one in force on the same positions (`replay`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec import runtime
from jaxspec.commands.check import FEWEST_ROWS
from jaxspec.commands.check.conventions import in_force
from jaxspec.commands.check.lossless import Differing, first_differences
from jaxspec.commands.check.reference import (
    Looks,
    Reference,
    compared,
    plain_config,
    rows_of,
    text_digest,
    weights_record,
)
from jaxspec.commands.check.replay import Text, search
from jaxspec.commands.check.report import Findings
from jaxspec.commands.check.statistics import Estimate, by_depth, row_means
from jaxspec.commands.check.text import PromptSet, special_ids
from jaxspec.commands.check.verdict import Evidence, findings
from jaxspec.commands.check.weights import look_at, oddities
from jaxspec.commands.options import UsageError, told
from jaxspec.commands.startup import shorten
from jaxspec.engine import Engine
from jaxspec.families import family_of
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
    reference: Reference | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Findings:
    """Check a pair.

    Args:
      prompts: at least `FEWEST_ROWS`.
      reference: what the drafter's maker measured.
      say: called with what is being done.

    Raises:
      UsageError: the pair or the text cannot be checked.
    """
    batch_size = min(batch_size, len(prompts.ids))
    say("looking at the weights")
    looks = Looks(look_at(target.params), look_at(drafter.params))
    say("the target continues the text, with drafts")
    shared: dict[str, Any] = dict(batch_size=batch_size, programs=runtime.Programs())
    drafting = Drafting(num_draft_tokens)
    speculative = decode_greedily(
        target, drafter, prompts.ids, new_tokens, drafting=drafting, **shared
    )
    say("the same, without")
    plain = decode_greedily(target, None, prompts.ids, new_tokens, **shared)
    drafts = num_draft_tokens or drafter.graph.bind_abstract().default_draft_tokens
    enough = _long_enough(plain, drafts)
    differences = first_differences(plain, speculative)
    kept = [*enough, *(i for i in differences if i not in enough)]
    text = Text.of([prompts.ids[i] for i in kept], [plain[i] for i in kept])
    judged = np.asarray([text.starts[n] - 1 + differences.get(i, 0) for n, i in enumerate(kept)])
    anchors = text.anchors(drafts)[: len(enough)]
    reading: dict[str, Any] = dict(num_draft_tokens=drafts, batch_size=batch_size, say=say)
    ids = special_ids(target)
    found = search(target, drafter, text, anchors, judged, **reading, special_ids=ids)
    differing = []
    for n, i in enumerate(kept):
        if i in differences:
            at = differences[i]
            tokens = (plain[i].token_ids[at], speculative[i].token_ids[at])
            where, logits = int(text.starts[n]) + at, found.replayed.logits[n]
            differing.append(Differing.of(i, where, tokens, logits, target.graph.dtype))
    depths = by_depth(found.accepted, anchors, drafts)
    shares = [row_means(found.accepted >= j, anchors) for j in range(1, drafts + 1)]
    length = float(np.mean([n for c in speculative for n in c.acceptance_lengths]))
    measured = Reference(
        text=prompts.origin,
        text_digest=text_digest(prompts, new_tokens),
        rows=len(enough),
        new_tokens=new_tokens,
        num_draft_tokens=drafts,
        positions=int(anchors.sum()),
        dtype=target.graph.dtype,
        device=jax.devices()[0].device_kind,
        accepted=round(float(np.sum(shares, axis=0).mean()), 4),
        acceptance_length=round(length, 4),
        by_depth=[round(d.share.mean, 4) for d in depths],
        by_row=rows_of(np.asarray(shares).T, enough, len(prompts.ids)),
        target=shorten(target.source),
        target_config=plain_config(target),
        target_weights=weights_record(target, looks.target),
        drafter_config=plain_config(drafter),
        drafter_weights=weights_record(drafter, looks.drafter),
    )
    evidence = Evidence(
        depths=depths,
        best_first=float(row_means(found.best_accepted >= 1, anchors).mean()),
        found=found,
        oddities=[
            dataclasses.replace(o, text=f"{whose}: {o.text}")
            for whose, seen in (("target", looks.target), ("drafter", looks.drafter))
            for o in oddities(seen)
        ],
        against=None if reference is None else compared(reference, measured, looks),
        differing=differing,
        floor=floor,
    )
    return Findings(
        target=shorten(target.source),
        drafter=shorten(drafter.source),
        batch_size=batch_size,
        replay_bytes=found.replayed.nbytes,
        conventions=in_force(target, drafter),
        by_position=[Estimate.of(share).within(0, 1) for share in shares],
        accepted=Estimate.of(row_means(found.accepted, anchors)).within(0, drafts),
        acceptance_length=length,
        rounds=found.rounds,
        evidence=evidence,
        measured=measured,
        findings=findings(evidence, family_of(drafter.config).conventions),
    )


def _long_enough(plain: Sequence[Completion], drafts: int) -> list[int]:
    """Return the rows that go on for more than one draft.

    Raises:
      UsageError: they are too few.
    """
    enough = [i for i, c in enumerate(plain) if len(c.token_ids) > drafts]
    if len(enough) < FEWEST_ROWS:
        raise UsageError(
            f"{len(enough)} of {len(plain)} rows go on for more than the {drafts} tokens of a draft; check "
            f"needs {FEWEST_ROWS}: raise --new-tokens, or give other text with --text"
        )
    return enough
