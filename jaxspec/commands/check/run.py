"""One check: does a drafter fit a target, and if not, why not? Read `run`, then `check_pair`.

A drafter with a wrong convention raises no error: its drafts are never accepted. So the target
continues a text greedily, and both models read the result again (teacher forcing). At every
position of the continuation the drafter drafts from the true context. Draft j is accepted there if
drafts 1 to j are the target's next tokens, which is what decoding would accept. `search` compares
other hypotheses about the drafter on the same positions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.commands.check import hypotheses, reference, statistics
from jaxspec.commands.check.options import MIN_ROWS, CheckOptions
from jaxspec.commands.check.replay import Evidence
from jaxspec.commands.check.report import Difference, Report, first_differences
from jaxspec.commands.check.search import SearchResult, as_configured, search
from jaxspec.commands.check.statistics import Depth, Estimate, row_means
from jaxspec.commands.check.text import (
    DRAWS,
    PromptSet,
    Text,
    decode_greedily,
    further,
    prompts_for,
    special_ids,
)
from jaxspec.commands.models import ModelOptions
from jaxspec.commands.options import UsageError
from jaxspec.commands.progress import Notify
from jaxspec.commands.startup import load_models, shorten
from jaxspec.engine.request import Completion
from jaxspec.options import Drafting
from jaxspec.runtime import runtime
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.measured_acceptance import write_acceptance


def run(models: ModelOptions, checking: CheckOptions, drafting: Drafting, notify: Notify) -> Report:
    """Load a pair and check it; record the measurement if asked for and the pair fits."""
    target, drafter = load_models(models)
    assert drafter is not None
    drafter.config.check_fits(target.config)
    known = None
    if checking.record:
        reference.check_recordable(drafter.directory)
    else:
        known = reference.reference_of(drafter.directory)
    notify("encoding")
    prompts = prompts_for(target, checking, "" if known is None else known.text)
    report = check_pair(
        target, drafter, prompts, checking, drafting.num_draft_tokens, known, notify
    )
    if checking.record and not report.problems:
        written = write_acceptance(drafter.directory, dataclasses.asdict(report.measured))
        report = dataclasses.replace(report, recorded=str(written))
    return report


def check_pair(
    target: LoadedModel,
    drafter: LoadedModel,
    prompts: PromptSet,
    checking: CheckOptions,
    num_draft_tokens: int | None,
    known: reference.Reference | None,
    notify: Notify,
) -> Report:
    """Check a pair, of whose drafter the maker's measurement may be known."""
    batch_size, new_tokens = min(checking.batch_size, len(prompts.ids)), checking.new_tokens
    notify("looking at the weights")
    looks = reference.look_at(target.params), reference.look_at(drafter.params)
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
    at = [text.starts[n] - 1 + differences.get(i, 0) for n, i in enumerate(kept)]
    sizes: dict[str, Any] = dict(num_draft_tokens=drafts, batch_size=batch_size, notify=notify)
    first = Evidence(
        target,
        text,
        statistics.FIRST_LEVEL,
        num_counted=len(enough),
        logit_rows=np.asarray(at),
        **sizes,
    )

    @functools.cache
    def second() -> Evidence | None:
        notify("the target continues more text, for what the first leaves open")
        more = further(target, prompts.ids, new_tokens, reserve=drafts, **options)
        if more is None:
            return None
        return Evidence(target, more, statistics.SECOND_LEVEL, rows_per_prompt=DRAWS, **sizes)

    result = search(drafter, first, second, special_ids(target), known)
    accepted, best = first.accepted(result.in_force), first.accepted(result.best)
    anchors = first.anchors()
    depths = statistics.by_depth(accepted, anchors, drafts)
    shares = [row_means(accepted >= j, anchors) for j in range(1, drafts + 1)]
    measured = _reference(
        target, drafter, prompts, new_tokens, speculative, enough, accepted, anchors, depths, looks
    )
    length = _acceptance_length(speculative)
    return Report(
        target=shorten(target.source),
        drafter=shorten(drafter.source),
        batch_size=batch_size,
        replay_bytes=first.nbytes,
        conventions=hypotheses.in_force(target, drafter),
        by_position=[Estimate.of(share).within(0, 1) for share in shares],
        accepted=Estimate.of(row_means(accepted, anchors)).within(0, drafts),
        acceptance_length=length,
        measured=measured,
        depths=depths,
        fallen=statistics.collapse(depths, checking.floor) or _fallen(result, depths, second),
        best_first=float(row_means(best >= 1, anchors).mean()),
        search=result,
        oddities=[
            *reference.oddities("target", looks[0]),
            *reference.oddities("drafter", looks[1]),
        ],
        comparison=None if known is None else reference.compare_with(known, measured, *looks),
        differing=[
            Difference.of(
                i,
                int(text.starts[n]) + (same := differences[i]),
                (plain[i].token_ids[same], speculative[i].token_ids[same]),
                first.logits[n],
                measured.dtype,
            )
            for n, i in enumerate(kept)
            if i in differences
        ],
        floor=checking.floor,
        family=hypotheses.conventions_of(drafter),
    )


def measure(
    target: LoadedModel,
    drafter: LoadedModel,
    prompts: PromptSet,
    *,
    new_tokens: int,
    batch_size: int,
    notify: Notify,
) -> reference.Reference:
    """Measure a pair as `check_pair` does, and compare it with nothing.

    Raises:
      UsageError: too few rows go on for more than one draft.
    """
    options: dict[str, Any] = dict(batch_size=batch_size, programs=runtime.Programs())
    done = decode_greedily(target, drafter, prompts.ids, new_tokens, **options)
    drafts = drafter.model_def.bind_abstract().default_draft_tokens
    enough = _long_enough(done, drafts)
    text = Text.of([prompts.ids[i] for i in enough], [done[i] for i in enough])
    sizes: dict[str, Any] = dict(num_draft_tokens=drafts, batch_size=batch_size, notify=notify)
    evidence = Evidence(target, text, statistics.FIRST_LEVEL, **sizes)
    evidence.replay([it := as_configured(drafter)])
    accepted, anchors = evidence.accepted(it), evidence.anchors()
    depths = statistics.by_depth(accepted, anchors, drafts)
    looks = reference.look_at(target.params), reference.look_at(drafter.params)
    return _reference(
        target, drafter, prompts, new_tokens, done, enough, accepted, anchors, depths, looks
    )


def _acceptance_length(done: Sequence[Completion]) -> float:
    return float(np.mean([n for c in done for n in c.acceptance_lengths]))


def _reference(
    target: LoadedModel,
    drafter: LoadedModel,
    prompts: PromptSet,
    new_tokens: int,
    done: Sequence[Completion],
    enough: Sequence[int],
    accepted: np.ndarray,
    anchors: np.ndarray,
    depths: Sequence[Depth],
    looks: tuple[Any, Any],
) -> reference.Reference:
    """Return the record of a measurement.

    Args:
      done: the text, decoded with drafts.
      enough: rows that are long enough; `accepted` and `anchors` are of them, [R, A].
      looks: at the weights of the target and of the drafter.
    """
    shares = [row_means(accepted > j, anchors) for j in range(len(depths))]
    return reference.Reference(
        text=prompts.origin,
        text_digest=reference.text_digest(prompts, new_tokens),
        rows=len(shares[0]),
        new_tokens=new_tokens,
        num_draft_tokens=len(shares),
        positions=int(anchors.sum()),
        dtype=target.model_def.dtype,
        device=jax.devices()[0].device_kind,
        accepted=round(float(np.sum(shares, axis=0).mean()), 4),
        acceptance_length=round(_acceptance_length(done), 4),
        by_depth=[round(d.share.mean, 4) for d in depths],
        by_row=reference.rows_of(np.asarray(shares).T, enough, len(prompts.ids)),
        target=shorten(target.source),
        target_config=reference.plain_config(target.config),
        target_weights=reference.weights_record(target, looks[0]),
        drafter_config=reference.plain_config(drafter.config),
        drafter_weights=reference.weights_record(drafter, looks[1]),
    )


def _fallen(
    result: SearchResult, depths: Sequence[Depth], second: Callable[[], Evidence | None]
) -> Depth | None:
    """Return the depth where drafts seem to fall on the first text, if they do on the second."""
    depth = statistics.doubtful(depths)
    evidence = None if depth is None else second()
    if depth is None or evidence is None:
        return None
    evidence.replay([result.in_force])
    accepted, anchors = evidence.accepted(result.in_force), evidence.anchors()
    return statistics.fallen(accepted, anchors, depth, statistics.SECOND_LEVEL)


def _long_enough(plain: Sequence[Completion], drafts: int) -> list[int]:
    """Return the rows that go on for more than one draft; too few are a UsageError."""
    enough = [i for i, c in enumerate(plain) if len(c.token_ids) > drafts]
    if len(enough) < MIN_ROWS:
        raise UsageError(
            f"{len(enough)} of {len(plain)} rows go on for more than the {drafts} tokens of a "
            f"draft; check needs {MIN_ROWS}: raise --new-tokens, or give other text with --text"
        )
    return enough
