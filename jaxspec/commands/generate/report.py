"""What a run gives back: a line of JSON a prompt, text on the terminal, a table at the end.

`PromptResult` is one prompt's outcome and `Summary` the whole run's; everything else here shows those two.
Results go to standard output or a file, everything about the run to standard error.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from jaxspec.records import Drafting, Sampling

_BAR_WIDTH = 24


@dataclass(frozen=True)
class PromptResult:
    """One prompt and what came of it; with `error`, nothing did. Logprobs are there where asked for."""

    index: int
    prompt: str | None
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...] = ()
    text: str | None = None
    finish_reason: str = "length"
    acceptance_lengths: tuple[int, ...] = ()
    error: str | None = None
    sample: int | None = None  # which of its prompt's, where there are several
    logprobs: tuple[float, ...] | None = None
    sampled_logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the values of this prompt's line."""
        values = {"prompt": self.prompt, "prompt_ids": self.prompt_ids}
        if self.sample is not None:
            values["sample"] = self.sample
        if self.error is not None:
            failed = {"token_ids": self.token_ids, "text": self.text} if self.token_ids else {}
            return {**values, **failed, "finish_reason": "error", "error": self.error}
        names = ("logprobs", "sampled_logprobs", "top_logprobs")
        logprobs = {n: value for n in names if (value := getattr(self, n)) is not None}
        return {
            **values,
            "token_ids": self.token_ids,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "verify_steps": len(self.acceptance_lengths),
            "acceptance_lengths": self.acceptance_lengths,
            "acceptance_length": _mean(self.acceptance_lengths),
            **logprobs,
        }


@dataclass(frozen=True)
class Summary:
    """A run's totals and the conditions they were reached under.

    Attributes:
      prompt_tokens: of each prompt once, however many samples it has.
      new_tokens: returned tokens, those of prefill included.
      decode_tokens: returned tokens without those of prefill: what `decode_s` was spent on.
      acceptance_length: mean over all verify steps of all prompts.
      acceptance_by_position: share of verify steps in which draft token 1, 2, ... was accepted.
      compile_s: in none of the other two.
      drafting: as asked; `num_draft_tokens` is what it came to, 0 without a drafter.
      sampling: with biases, but for those that ban; these are `ban_tokens`.
    """

    prompts: int
    num_samples: int  # of each prompt
    errors: int
    prompt_tokens: int
    new_tokens: int
    decode_tokens: int
    decode_tokens_per_s: float | None
    verify_steps: int
    acceptance_length: float | None
    acceptance_by_position: tuple[float, ...]
    prefill_s: float
    decode_s: float
    compile_s: float
    load_s: float
    total_s: float
    target: str
    drafter: str | None
    drafting: Drafting
    num_draft_tokens: int
    batch_size: int
    cache_length: int
    max_new_tokens: int
    sampling: Sampling
    ban_tokens: tuple[int, ...]
    seed: int
    dtype: str
    platform: str
    device: str
    mesh: dict[str, int]
    versions: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return the values of the last line, those of the two records among them."""
        values: dict[str, Any] = {}
        for name, value in dataclasses.asdict(self).items():
            values |= value if name in ("drafting", "sampling") else {name: value}
        del values["synthetic_acceptance"]  # no option of the command
        return {"summary": values}


def acceptance_by_position(acceptance_lengths: Sequence[int], depth: int) -> tuple[float, ...]:
    """Return the share of verify steps that accepted the first, second, ... draft token."""
    if not acceptance_lengths:
        return ()
    return tuple(
        sum(length > position for length in acceptance_lengths) / len(acceptance_lengths)
        for position in range(1, depth + 1)
    )


def _mean(values: Sequence[int]) -> float | None:
    return sum(values) / len(values) if values else None


# --- terminal ----------------------------------------------------------------------------------------


def summary_table(summary: Summary) -> Group:
    """Return a run's summary as a short table: numbers first, the conditions below them."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", justify="right")
    rows.add_column()
    errors = f", [red]{summary.errors} refused[/]" if summary.errors else ""
    samples = f", {summary.num_samples} samples of each" if summary.num_samples > 1 else ""
    prompts = _count(summary.prompts - summary.errors, "prompt") + samples + errors
    rows.add_row(
        "tokens",
        f"[bold]{summary.new_tokens:,}[/] new, {summary.prompt_tokens:,} in {prompts}",
    )
    if summary.decode_tokens_per_s is not None:
        rows.add_row("speed", f"[bold]{summary.decode_tokens_per_s:,.1f}[/] tok/s decoding")
    if summary.drafter is None:
        rows.add_row("drafter", f"none: {_count(summary.verify_steps, 'plain decode step')}")
    elif summary.acceptance_length is not None:
        rows.add_row(
            "acceptance length",
            f"[bold green]{summary.acceptance_length:.2f}[/] tokens a step, "
            f"{_count(summary.verify_steps, 'verify step')} of up to {len(summary.acceptance_by_position) + 1}",
        )
        for position, share in enumerate(summary.acceptance_by_position, 1):
            rows.add_row(
                f"draft token {position}", Text(_bar(share), "green").append(f" {share:4.0%}")
            )
    rows.add_row("seconds", f"{summary.prefill_s:.2f} prefill, {summary.decode_s:.2f} decode")
    rows.add_row("", f"[dim]apart: {summary.compile_s:.1f} compile, {summary.load_s:.1f} load[/]")
    drafter = "" if summary.drafter is None else f" + {summary.drafter}"
    conditions = Text(
        f"{summary.target}{drafter} · {summary.dtype} on {summary.device} · batch {summary.batch_size} · "
        f"cache {summary.cache_length}",
        style="dim",
    )
    return Group("", Padding(rows, (0, 0, 0, 1)), Padding(conditions, (0, 0, 0, 1)))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _bar(share: float) -> str:
    """Draw a share in eighths of a cell, padded to a fixed width."""
    eighths = round(share * _BAR_WIDTH * 8)
    full, part = divmod(eighths, 8)
    bar = "█" * full + (" ▏▎▍▌▋▊▉"[part] if part else "")
    return bar + "·" * (_BAR_WIDTH - len(bar))


def header(result: PromptResult, total: int) -> str:
    """Return the line above one of many completions."""
    shown = result.prompt if result.prompt is not None else _ids(result.prompt_ids)
    shown = shown.replace("\n", "\\n")
    return f"── {result.index + 1}/{total} ── {shown if len(shown) <= 60 else shown[:59] + '…'}"


def body(result: PromptResult) -> str:
    """Return a completion as text, or as ids where there is no tokenizer."""
    return _ids(result.token_ids) if result.text is None else result.text


def _ids(ids: Sequence[int]) -> str:
    return ",".join(map(str, ids))


class RunProgress:
    """A bar for many prompts on standard error, which steps aside while results are printed.

    It counts tokens, since rows of a batch finish in bursts. Without a terminal it shows nothing.
    """

    def __init__(self, console: Console, budgets: Sequence[int]):
        """Start the bar.

        Args:
          budgets: most new tokens of each prompt; what an early stop leaves over counts as done.
        """
        self._budgets = budgets
        self._tokens = [0] * len(budgets)
        self._finished = [False] * len(budgets)
        self._progress = Progress(
            TextColumn("[dim]{task.fields[prompts]}"),
            BarColumn(),
            TextColumn("{task.fields[tokens]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._progress.add_task(
            "", total=sum(budgets), tokens="compiling", prompts=f"0/{len(budgets)} prompts"
        )
        self._progress.start()

    def update(self, index: int, tokens: int, *, finished: bool = False) -> None:
        """Note how many tokens a prompt has."""
        self._tokens[index], self._finished[index] = tokens, finished
        done = sum(
            budget if over else count
            for budget, count, over in zip(self._budgets, self._tokens, self._finished, strict=True)
        )
        # Prefill gives one token; then the loop itself is compiled, which may take longest of all.
        compiling = max(self._tokens) <= 1 and not all(self._finished)
        self._progress.update(
            self._task,
            completed=done,
            tokens="compiling" if compiling else f"{sum(self._tokens):,} tokens",
            prompts=f"{sum(self._finished)}/{len(self._budgets)} prompts",
        )

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Take the bar off the terminal while the block prints."""
        self._progress.stop()
        try:
            yield
        finally:
            self._progress.start()

    def close(self) -> None:
        """Take the bar away for good."""
        self._progress.stop()
