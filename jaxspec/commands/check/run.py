"""One check: does a drafter fit a target, and if not, why not? Read `run`.

A drafter with a wrong convention raises no error: its drafts are never accepted. So the target
continues a text greedily, and both models read the result again (teacher forcing). At every
position of the continuation the drafter drafts from the true context. Draft j is accepted there if
drafts 1 to j are the target's next tokens, which is what decoding would accept. `search` compares
other hypotheses about the drafter on the same positions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.commands.check.hypotheses import conventions_of, in_force
from jaxspec.commands.check.lossless import Difference, first_differences
from jaxspec.commands.check.reference import (
    Reference,
    compare_with,
    look_at,
    oddities,
    plain_config,
    rows_of,
    text_digest,
    weights_record,
)
from jaxspec.commands.check.replay import Evidence
from jaxspec.commands.check.report import Report
from jaxspec.commands.check.search import SearchResult, search
from jaxspec.commands.check.statistics import (
    FIRST_LEVEL,
    MIN_ROWS,
    SECOND_LEVEL,
    Depth,
    Estimate,
    by_depth,
    collapse,
    doubtful,
    fallen,
    row_means,
)
from jaxspec.commands.check.text import (
    DRAWS,
    PromptSet,
    Text,
    decode_greedily,
    further,
    special_ids,
)
from jaxspec.commands.options import UsageError
from jaxspec.commands.startup import shorten
from jaxspec.engine.request import Completion
from jaxspec.options import Drafting
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
    notify: Callable[[str], None] = lambda _: None,
) -> Report:
    """Check a pair.

    Args:
      prompts: at least `MIN_ROWS`.
      reference: the measurement of the drafter's maker.
      notify: called with the current activity.

    Raises:
      UsageError: the pair cannot be checked.
    """
    batch_size = min(batch_size, len(prompts.ids))
    notify("looking at the weights")
    looks = look_at(target.params), look_at(drafter.params)
    notify("the target continues the text, with drafts")
    options: dict[str, Any] = dict(batch_size=batch_size, programs=runtime.Programs())
    drafting = Drafting(num_draft_tokens)
    speculative = decode_greedily(
        target, drafter, prompts.ids, new_tokens, drafting=drafting, **options
    )
    notify("the same, without")
    plain = decode_greedily(target, None, prompts.ids, new_tokens, **options)
    drafts = num_draft_tokens or drafter.model_def.bind_abstract().default_draft_tokens
    enough = _long_enough(plain, drafts)
    differences = first_differences(plain, speculative)
    kept = [*enough, *(i for i in differences if i not in enough)]
    text = Text.of([prompts.ids[i] for i in kept], [plain[i] for i in kept])
    logit_rows = np.asarray(
        [text.starts[n] - 1 + differences.get(i, 0) for n, i in enumerate(kept)]
    )
    sizes: dict[str, Any] = dict(num_draft_tokens=drafts, batch_size=batch_size, notify=notify)
    first = Evidence(
        target, text, FIRST_LEVEL, num_counted=len(enough), logit_rows=logit_rows, **sizes
    )

    @functools.cache
    def second() -> Evidence | None:
        notify("the target continues more text, for what the first leaves open")
        more = further(target, prompts.ids, new_tokens, reserve=drafts, **options)
        if more is None:
            return None
        return Evidence(target, more, SECOND_LEVEL, rows_per_prompt=DRAWS, **sizes)

    result = search(drafter, first, second, special_ids(target), reference)
    accepted, best = first.accepted(result.in_force), first.accepted(result.best)
    anchors = first.anchors()
    depths = by_depth(accepted, anchors, drafts)
    shares = [row_means(accepted >= j, anchors) for j in range(1, drafts + 1)]
    length = float(np.mean([n for c in speculative for n in c.acceptance_lengths]))
    measured = Reference(
        text=prompts.origin,
        text_digest=text_digest(prompts, new_tokens),
        rows=len(shares[0]),
        new_tokens=new_tokens,
        num_draft_tokens=len(shares),
        positions=int(anchors.sum()),
        dtype=target.model_def.dtype,
        device=jax.devices()[0].device_kind,
        accepted=round(float(np.sum(shares, axis=0).mean()), 4),
        acceptance_length=round(length, 4),
        by_depth=[round(d.share.mean, 4) for d in depths],
        by_row=rows_of(np.asarray(shares).T, enough, len(prompts.ids)),
        target=shorten(target.source),
        target_config=plain_config(target.config),
        target_weights=weights_record(target, looks[0]),
        drafter_config=plain_config(drafter.config),
        drafter_weights=weights_record(drafter, looks[1]),
    )
    return Report(
        target=shorten(target.source),
        drafter=shorten(drafter.source),
        batch_size=batch_size,
        replay_bytes=first.nbytes,
        conventions=in_force(target, drafter),
        by_position=[Estimate.of(share).within(0, 1) for share in shares],
        accepted=Estimate.of(row_means(accepted, anchors)).within(0, drafts),
        acceptance_length=length,
        measured=measured,
        depths=depths,
        fallen=collapse(depths, floor) or _fallen(result, depths, second),
        best_first=float(row_means(best >= 1, anchors).mean()),
        search=result,
        oddities=[*oddities("target", looks[0]), *oddities("drafter", looks[1])],
        comparison=None if reference is None else compare_with(reference, measured, *looks),
        differing=[
            Difference.of(
                i,
                int(text.starts[n]) + (at := differences[i]),
                (plain[i].token_ids[at], speculative[i].token_ids[at]),
                first.logits[n],
                target.model_def.dtype,
            )
            for n, i in enumerate(kept)
            if i in differences
        ],
        floor=floor,
        family=conventions_of(drafter),
    )


def _fallen(
    result: SearchResult, depths: Sequence[Depth], second: Callable[[], Evidence | None]
) -> Depth | None:
    """Return the depth where drafts seem to fall on the first text, if they do on the second."""
    depth = doubtful(depths)
    evidence = None if depth is None else second()
    if depth is None or evidence is None:
        return None
    evidence.replay([result.in_force])
    accepted, anchors = evidence.accepted(result.in_force), evidence.anchors()
    return fallen(accepted, anchors, depth, SECOND_LEVEL)


def _long_enough(plain: Sequence[Completion], drafts: int) -> list[int]:
    """Return the rows that go on for more than one draft.

    Raises:
      UsageError: they are too few.
    """
    enough = [i for i, c in enumerate(plain) if len(c.token_ids) > drafts]
    if len(enough) < MIN_ROWS:
        raise UsageError(
            f"{len(enough)} of {len(plain)} rows go on for more than the {drafts} tokens of a "
            f"draft; check needs {MIN_ROWS}: raise --new-tokens, or give other text with --text"
        )
    return enough
