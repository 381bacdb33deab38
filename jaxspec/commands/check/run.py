"""`jaxspec check`: does this drafter fit this target, and if not, why not?

A drafter with one convention wrong raises no error: its drafts are just never accepted. Read `run`. The
target continues some text greedily; then both models read it again (teacher forcing), and at every
position of the continuation the drafter drafts from the true context. Draft j is accepted there when
drafts 1 to j are the target's own next tokens, so what is counted is what decoding would accept. Other
readings of the drafter are held against the one in force on the same positions (`search`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.commands.check import FEWEST_ROWS
from jaxspec.commands.check.continuations import DRAWS, decode_greedily, further
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
from jaxspec.commands.check.replay import Text
from jaxspec.commands.check.report import Findings
from jaxspec.commands.check.search import Found, Page, search
from jaxspec.commands.check.statistics import (
    FIRST_LEVEL,
    SECOND_LEVEL,
    Depth,
    Estimate,
    by_depth,
    collapse,
    doubtful,
    fallen,
    row_means,
)
from jaxspec.commands.check.text import PromptSet, special_ids
from jaxspec.commands.check.verdict import Evidence, findings
from jaxspec.commands.check.weights import Oddity, look_at, oddities
from jaxspec.commands.options import UsageError
from jaxspec.commands.startup import shorten
from jaxspec.engine.request import Completion
from jaxspec.options import Drafting
from jaxspec.registry import family_of
from jaxspec.runtime import runtime
from jaxspec.weights.loading import LoadedModel


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

    `prompts` are at least `FEWEST_ROWS`; `reference` is what the drafter's maker measured.

    Raises:
      UsageError: it cannot be checked.
    """
    batch_size = min(batch_size, len(prompts.ids))
    say("looking at the weights")
    looks = Looks(look_at(target.params), look_at(drafter.params))
    say("the target continues the text, with drafts")
    shared: dict[str, Any] = dict(batch_size=batch_size, programs=runtime.Programs())
    given = (prompts.ids, new_tokens)
    drafting = Drafting(num_draft_tokens)
    speculative = decode_greedily(target, drafter, *given, drafting=drafting, **shared)
    say("the same, without")
    plain = decode_greedily(target, None, *given, **shared)
    drafts = num_draft_tokens or drafter.model_def.bind_abstract().default_draft_tokens
    enough = _long_enough(plain, drafts)
    differences = first_differences(plain, speculative)
    kept = [*enough, *(i for i in differences if i not in enough)]
    text = Text.of([prompts.ids[i] for i in kept], [plain[i] for i in kept])
    judged = np.asarray([text.starts[n] - 1 + differences.get(i, 0) for n, i in enumerate(kept)])
    sizes: dict[str, Any] = dict(num_draft_tokens=drafts, batch_size=batch_size, say=say)
    first = Page(target, text, FIRST_LEVEL, judged=len(enough), logit_rows=judged, **sizes)

    second = functools.cache(lambda: _second_page(target, *given, shared, sizes))
    found = search(drafter, first, second, special_ids(target), reference)
    anchors = first.anchors()
    differing = _differing(target, text, (plain, speculative), kept, differences, found)
    depths = by_depth(found.accepted, anchors, drafts)
    shares = [row_means(found.accepted >= j, anchors) for j in range(1, drafts + 1)]
    length = float(np.mean([n for c in speculative for n in c.acceptance_lengths]))
    measured = Reference(
        text=prompts.origin,
        text_digest=text_digest(prompts, new_tokens),
        new_tokens=new_tokens,
        positions=int(anchors.sum()),
        acceptance_length=round(length, 4),
        by_row=rows_of(np.asarray(shares).T, enough, len(prompts.ids)),
        **_acceptance(shares, depths),
        **_models(target, drafter, looks),
    )
    evidence = Evidence(
        depths=depths,
        fallen=collapse(depths, floor) or _fallen(found, depths, second),
        best_first=float(row_means(found.best_accepted >= 1, anchors).mean()),
        found=found,
        oddities=_oddities(looks),
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


def _second_page(
    target: LoadedModel,
    prompts: Sequence[tuple[int, ...]],
    new_tokens: int,
    options: Mapping[str, Any],
    sizes: Mapping[str, Any],
) -> Page | None:
    """Make the second text; `options` are the engine's, `sizes` the page's."""
    sizes["say"]("the target continues more text, for what the first leaves open")
    room = sizes["num_draft_tokens"]
    text = further(target, prompts, new_tokens, room=room, **options)
    if text is None:
        return None
    return Page(target, text, SECOND_LEVEL, rows_per_prompt=DRAWS, **sizes)


def _acceptance(shares: Sequence[np.ndarray], depths: Sequence[Depth]) -> dict[str, Any]:
    """Return what a record says of acceptance; `shares` are each depth's, of every row."""
    return dict(
        rows=len(shares[0]),
        num_draft_tokens=len(shares),
        accepted=round(float(np.sum(shares, axis=0).mean()), 4),
        by_depth=[round(d.share.mean, 4) for d in depths],
    )


def _fallen(
    found: Found, depths: Sequence[Depth], second: Callable[[], Page | None]
) -> Depth | None:
    """Ask the second text whether drafts fall at a depth where they seem to on the first."""
    depth = doubtful(depths)
    page = None if depth is None else second()
    if depth is None or page is None:
        return None
    page.read([found.in_force])
    return fallen(page.accepted(found.in_force), page.anchors(), depth, SECOND_LEVEL)


def _models(target: LoadedModel, drafter: LoadedModel, looks: Looks) -> dict[str, Any]:
    """Return what a record says of the models, and of where they ran."""
    return dict(
        dtype=target.model_def.dtype,
        device=jax.devices()[0].device_kind,
        target=shorten(target.source),
        target_config=plain_config(target.config),
        target_weights=weights_record(target, looks.target),
        drafter_config=plain_config(drafter.config),
        drafter_weights=weights_record(drafter, looks.drafter),
    )


def _oddities(looks: Looks) -> list[Oddity]:
    """Say what stands out in the weights of either model."""
    return [
        dataclasses.replace(o, text=f"{whose}: {o.text}")
        for whose, seen in (("target", looks.target), ("drafter", looks.drafter))
        for o in oddities(seen)
    ]


def _differing(
    target: LoadedModel,
    text: Text,
    done: tuple[Sequence[Completion], Sequence[Completion]],
    kept: Sequence[int],
    differences: Mapping[int, int],
    found: Found,
) -> list[Differing]:
    """Describe where rows differ; `done` is what plain and speculative decoding wrote."""
    return [
        Differing.of(
            i,
            int(text.starts[n]) + (at := differences[i]),
            (done[0][i].token_ids[at], done[1][i].token_ids[at]),
            found.replayed.logits[n],
            target.model_def.dtype,
        )
        for n, i in enumerate(kept)
        if i in differences
    ]


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
