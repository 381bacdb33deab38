"""What a run gives back: a line of JSON a completion, text on the terminal, a table at the end.

`PromptResult` is one completion, `Tally` adds them up, and `Summary` is the whole run; everything else here shows
those. Results go to standard output or a file, everything about the run to standard error.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from jaxspec.commands.progress import Ticker
from jaxspec.options import Drafting, Sampling

_BAR_WIDTH = 24


@dataclass(frozen=True)
class PromptResult:
    """One completion of a prompt; with `error`, it is none. Logprobs are there where asked for."""

    index: int  # of the prompt
    prompt: str | None
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...] = ()
    text: str | None = None
    finish_reason: str = "length"
    acceptance_lengths: tuple[int, ...] = ()
    error: str | None = None
    sample: int | None = None  # which of its prompt's, where there are several
    digest: str | None = None  # see `identity`
    id: str | int | None = None
    seed: int = 0
    logprobs: tuple[float, ...] | None = None
    sampled_logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the values of this completion's line. The first two are how `rows` knows it again."""
        optional = ("sample", "logprobs", "sampled_logprobs", "top_logprobs")
        there = {name: value for name in optional if (value := getattr(self, name)) is not None}
        values: dict[str, Any] = {"index": self.index, "digest": self.digest}
        if self.id is not None:
            values["id"] = self.id
        values["seed"] = self.seed
        if "sample" in there:
            values["sample"] = there.pop("sample")
        values |= {"prompt": self.prompt, "prompt_ids": self.prompt_ids}
        extra = {"extra": self.extra} if self.extra else {}
        if self.error is not None:
            before = {"token_ids": self.token_ids, "text": self.text} if self.token_ids else {}
            return {**values, **before, "finish_reason": "error", "error": self.error, **extra}
        return {
            **values,
            "token_ids": self.token_ids,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "verify_steps": len(self.acceptance_lengths),
            "acceptance_lengths": self.acceptance_lengths,
            "acceptance_length": mean(Counter(self.acceptance_lengths)),
            **there,
            **extra,
        }


@dataclass
class Tally:
    """Adds up rows, and keeps none of them: those of a run, and those that it takes over.

    Attributes:
      steps: how many verify steps committed how many tokens.
      errors: prompts without a completion, by index.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    steps: Counter[int] = field(default_factory=Counter)
    errors: set[int] = field(default_factory=set)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add the values of a line."""
        if "error" in row:
            self.errors.add(row["index"])
            return
        self.new_tokens += len(row["token_ids"])
        self.steps.update(row["acceptance_lengths"])
        if not row.get("sample"):
            self.prompt_tokens += len(row["prompt_ids"])


@dataclass(frozen=True)
class Summary:
    """A run's totals and the conditions they were reached under.

    Counts are of all rows, those that were taken over included. Seconds, `decode_tokens` and speeds are of this run.

    Attributes:
      errors: prompts without a completion.
      taken_over: rows that an earlier run had finished.
      prompt_tokens: of each prompt once, however many samples it has.
      new_tokens: returned tokens, those of prefill included.
      decode_tokens: returned tokens without those of prefill: what `decode_s` was spent on.
      plain_tokens_per_s: what plain decoding would have made of the same rows, see `plain`; None: not measured.
      plain_measured_s: what it took to find that out.
      acceptance_length: mean over all verify steps of all prompts.
      acceptance_by_position: share of verify steps in which draft token 1, 2, ... was accepted.
      steps_by_length: steps of the batch by how many drafts they verified; empty where that was not chosen.
      compile_s: in none of the other two.
      drafting: as asked; `num_draft_tokens` is what it came to, 0 without a drafter.
      choose_length: as asked; `steps_by_length` says what came of it.
      sampling: with biases, but for those that ban; these are `ban_tokens`.
    """

    prompts: int
    num_samples: int  # of each prompt
    errors: int
    taken_over: int
    prompt_tokens: int
    new_tokens: int
    decode_tokens: int
    decode_tokens_per_s: float | None
    plain_tokens_per_s: float | None
    plain_measured_s: float | None
    verify_steps: int
    acceptance_length: float | None
    acceptance_by_position: tuple[float, ...]
    steps_by_length: dict[int, int]
    prefill_s: float
    decode_s: float
    compile_s: float
    load_s: float
    total_s: float
    target: str
    drafter: str | None
    drafting: Drafting
    num_draft_tokens: int
    choose_length: str
    batch_size: int
    cache_length: int
    max_new_tokens: int
    sampling: Sampling
    ban_tokens: tuple[int, ...]
    seed: int
    dtype: str
    drafter_dtype: str | None
    platform: str
    device: str
    mesh: dict[str, int]
    versions: dict[str, str]

    @property
    def plain_is_faster(self) -> bool:
        """Whether plain decoding was measured to be faster, by more than such a measurement is wrong."""
        plain, own = self.plain_tokens_per_s, self.decode_tokens_per_s
        return plain is not None and own is not None and plain > own * 1.05

    def to_json(self) -> dict[str, Any]:
        """Return the values of the last line, those of the two records among them."""
        values: dict[str, Any] = {}
        for name, value in dataclasses.asdict(self).items():
            values |= value if name in ("drafting", "sampling") else {name: value}
        del values["synthetic_acceptance"]  # no option of the command
        return {"summary": values}


def acceptance_by_position(steps: Counter[int], depth: int) -> tuple[float, ...]:
    """Return the share of verify steps that accepted the first, second, ... draft token."""
    total = steps.total()
    if not total:
        return ()
    return tuple(
        sum(count for length, count in steps.items() if length > position) / total
        for position in range(1, depth + 1)
    )


def mean(steps: Counter[int]) -> float | None:
    """Return the mean tokens a verify step; None without a step."""
    total = steps.total()
    return sum(length * count for length, count in steps.items()) / total if total else None


# --- terminal ----------------------------------------------------------------------------------------


def summary_table(summary: Summary) -> Group:
    """Return a run's summary as a short table: numbers first, the conditions below them."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", justify="right")
    rows.add_column()
    errors = f", [red]{summary.errors} with an error[/]" if summary.errors else ""
    samples = f", {summary.num_samples} samples of each" if summary.num_samples > 1 else ""
    prompts = _count(summary.prompts - summary.errors, "prompt") + samples + errors
    rows.add_row(
        "tokens",
        f"[bold]{summary.new_tokens:,}[/] new, {summary.prompt_tokens:,} in {prompts}",
    )
    if summary.taken_over:
        rows.add_row(
            "", f"[dim]{_count(summary.taken_over, 'row')} of an earlier run among them[/]"
        )
    if summary.decode_tokens_per_s is not None:
        rows.add_row("speed", f"[bold]{summary.decode_tokens_per_s:,.1f}[/] tok/s decoding")
    if summary.plain_tokens_per_s is not None:
        rows.add_row("plain", _compared(summary, summary.plain_tokens_per_s))
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
    if len(summary.steps_by_length) > 1:
        rows.add_row("drafts verified", _by_length(summary.steps_by_length))
    rows.add_row("seconds", f"{summary.prefill_s:.2f} prefill, {summary.decode_s:.2f} decode")
    rows.add_row("", f"[dim]apart: {summary.compile_s:.1f} compile, {summary.load_s:.1f} load[/]")
    drafter = "" if summary.drafter is None else f" + {summary.drafter}"
    if summary.drafter_dtype not in (None, "float32", "bfloat16"):
        drafter += f" ({summary.drafter_dtype})"
    conditions = Text(
        f"{summary.target}{drafter} · {summary.dtype} on {summary.device} · batch {summary.batch_size} · "
        f"cache {summary.cache_length}",
        style="dim",
    )
    return Group("", Padding(rows, (0, 0, 0, 1)), Padding(conditions, (0, 0, 0, 1)))


def _by_length(steps: Mapping[int, int]) -> str:
    """Say how many of the batch's steps verified how many drafts."""
    total = sum(steps.values())
    shares = [f"{v or 'none'} in {count / total:.0%}" for v, count in sorted(steps.items())]
    return f"{', '.join(shares)} of {_count(total, 'step')}, as was quickest"


def _compared(summary: Summary, plain: float) -> Text:
    """Say how fast plain decoding is, and what to do where it is faster."""
    found = Text(f"{plain:,.1f} tok/s without the drafter")
    found.append(f" (measured in {summary.plain_measured_s:.1f} s)", "dim")
    if summary.plain_is_faster:
        others = ["fewer --num-draft-tokens"] * (summary.num_draft_tokens > 1)
        others += ["a smaller --batch-size"] * (summary.batch_size > 1)
        found.append("\nspeculation loses here: add --drafter none", "yellow")
        if others:
            found.append(f"; {' or '.join(others)} may help, too", "yellow")
    return found


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _bar(share: float) -> str:
    """Draw a share in eighths of a cell, padded to a fixed width."""
    eighths = round(share * _BAR_WIDTH * 8)
    full, part = divmod(eighths, 8)
    bar = "█" * full + (" ▏▎▍▌▋▊▉"[part] if part else "")
    return bar + "·" * (_BAR_WIDTH - len(bar))


def header(result: PromptResult, number: int, total: int) -> str:
    """Return the line above one of many completions."""
    shown = result.prompt if result.prompt is not None else _ids(result.prompt_ids)
    shown = shown.replace("\n", "\\n")
    return f"── {number}/{total} ── {shown if len(shown) <= 60 else shown[:59] + '…'}"


def body(result: PromptResult) -> str:
    """Return a completion as text, or as ids where there is no tokenizer."""
    return _ids(result.token_ids) if result.text is None else result.text


def _ids(ids: Sequence[int]) -> str:
    return ",".join(map(str, ids))


class RunProgress:
    """A bar for many prompts on standard error, which steps aside while results are printed.

    It counts tokens, since rows of a batch finish in bursts. Without a terminal it prints a line now and then.
    """

    def __init__(self, console: Console, budgets: Mapping[Hashable, int]):
        """Start the bar.

        Args:
          budgets: most new tokens of each row, by its name; what an early stop leaves over counts as done.
        """
        self._budgets = budgets
        self._tokens = dict.fromkeys(budgets, 0)
        self._total, self._left_over, self._finished = 0, 0, 0
        self._compiling = True
        self._ticker = Ticker(console)
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
            "",
            total=sum(budgets.values()),
            tokens="compiling",
            prompts=f"0/{len(budgets)} prompts",
        )
        self._progress.start()

    def update(self, name: Hashable, tokens: int, *, finished: bool = False) -> None:
        """Note how many tokens a row has."""
        self._total += tokens - self._tokens[name]
        self._tokens[name] = tokens
        if finished:
            self._finished += 1
            self._left_over += self._budgets[name] - tokens
        # Prefill gives one token; then the loop itself is compiled, which may take longest of all.
        self._compiling &= tokens <= 1 and self._finished < len(self._budgets)
        shown = "compiling" if self._compiling else f"{self._total:,} tokens"
        prompts = f"{self._finished}/{len(self._budgets)} prompts"
        self._progress.update(
            self._task, completed=self._total + self._left_over, tokens=shown, prompts=prompts
        )
        self._ticker.say(f"{prompts}, {shown}")

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
