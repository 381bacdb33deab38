"""The results of a run: a line of JSON per completion, text on the terminal, a table at the end.

`PromptResult` is one completion, `Tally` adds completions up, and `Summary` is the whole run. The
rest of the module shows these. Results go to standard output or a file, everything else to standard
error.
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

from jaxspec.commands.generate.requests import PromptRequest
from jaxspec.commands.progress import Ticker
from jaxspec.engine.request import Completion
from jaxspec.options import Drafting, Sampling
from jaxspec.tokenizer import Tokenizer, completed_text

_BAR_WIDTH = 24


@dataclass(frozen=True)
class PromptResult:
    """A completion and its request.

    Attributes:
      text: of the completion, cut before a stop text; None without a tokenizer.
    """

    request: PromptRequest
    done: Completion
    text: str | None = None

    @classmethod
    def of(
        cls, request: PromptRequest, done: Completion, tokenizer: Tokenizer | None
    ) -> PromptResult:
        """Return a completion with its text."""
        if tokenizer is None:
            return cls(request, done)
        return cls(request, done, completed_text(tokenizer, done.token_ids, request.stop))

    @property
    def error(self) -> str | None:
        """The reason why there is no completion; None if there is one."""
        return self.request.error or self.done.error

    def to_json(self) -> dict[str, Any]:
        """Return the values of this completion's line; `rows` recognises it by the first two."""
        (index, sample), prompt = self.request.key, self.request.prompt
        request, done = self.request.request, self.done
        values: dict[str, Any] = {"index": index, "digest": self.request.digest}
        if prompt.id is not None:
            values["id"] = prompt.id
        values["seed"] = request.seed
        if sample is not None:
            values["sample"] = sample
        values |= {"prompt": self.request.text, "prompt_ids": request.prompt_ids}
        extra = {"extra": prompt.extra} if prompt.extra else {}
        tokens = {"token_ids": done.token_ids, "text": self.text}
        if self.error is not None:
            before = tokens if done.token_ids else {}
            return {**values, **before, "finish_reason": "error", "error": self.error, **extra}
        return {
            **values,
            **tokens,
            "finish_reason": done.finish_reason,
            "verify_steps": len(done.acceptance_lengths),
            "acceptance_lengths": done.acceptance_lengths,
            "acceptance_length": mean(Counter(done.acceptance_lengths)),
            **self._logprobs(),
            **extra,
        }

    def _logprobs(self) -> dict[str, Any]:
        """Return the log-probabilities that this row asked for; its batch may have more."""
        sampling, done = self.request.request.sampling, self.done
        if not (sampling.logprobs or sampling.top_logprobs):
            return {}
        values: dict[str, Any] = {
            "logprobs": done.logprobs,
            "sampled_logprobs": done.sampled_logprobs,
        }
        if sampling.top_logprobs and done.top_logprobs:
            limit = sampling.top_logprobs
            values["top_logprobs"] = tuple(best[:limit] for best in done.top_logprobs)
        return {name: value for name, value in values.items() if value is not None}


@dataclass
class Tally:
    """Totals of all rows, those of an earlier run included.

    Attributes:
      steps: number of verify steps, by the number of tokens they committed.
      errors: prompts without a completion, by index.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    steps: Counter[int] = field(default_factory=Counter)
    errors: set[int] = field(default_factory=set)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add the values of a row."""
        if "error" in row:
            self.errors.add(row["index"])
            return
        self.new_tokens += len(row["token_ids"])
        self.steps.update(row["acceptance_lengths"])
        if not row.get("sample"):
            self.prompt_tokens += len(row["prompt_ids"])


@dataclass(frozen=True)
class Summary:
    """The totals of a run and its conditions.

    Counts include rows that were taken over. Seconds, `decode_tokens` and speeds are of this run.
    `docs/command-line.md` explains each field.

    Attributes:
      decode_tokens: returned tokens without those of prefill, decoded in `decode_s`.
      plain_tokens_per_s: speed of plain decoding on the same rows, see `plain`; None if not
        measured.
      steps_by_length: steps of the batch by their number of verified drafts; empty if that is
        fixed.
      drafting, sampling: the options, whose fields JSON has beside the others. `num_draft_tokens` is
        the number in use. Bans are not in the biases, but in `ban_tokens`.
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
        """True if plain decoding was measured to be faster, by more than the error of measuring."""
        plain, own = self.plain_tokens_per_s, self.decode_tokens_per_s
        return plain is not None and own is not None and plain > own * 1.05

    def to_json(self) -> dict[str, Any]:
        """Return the values of the last line, with the fields of both records."""
        values: dict[str, Any] = {}
        for name, value in dataclasses.asdict(self).items():
            values |= value if name in ("drafting", "sampling") else {name: value}
        del values["synthetic_acceptance"]  # no option of the command
        return {"summary": values}


def acceptance_by_position(steps: Counter[int], depth: int) -> tuple[float, ...]:
    """Return the share of verify steps that accepted draft token 1, 2, ..."""
    total = steps.total()
    if not total:
        return ()
    return tuple(
        sum(count for length, count in steps.items() if length > position) / total
        for position in range(1, depth + 1)
    )


def mean(steps: Counter[int]) -> float | None:
    """Return the mean tokens per verify step; None without a step."""
    total = steps.total()
    return sum(length * count for length, count in steps.items()) / total if total else None


# --- terminal ------------------------------------------------------------------------------------


def summary_table(summary: Summary) -> Group:
    """Return a run's summary as a table: numbers first, conditions below."""
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
            f"{_count(summary.verify_steps, 'verify step')} of up to "
            f"{len(summary.acceptance_by_position) + 1}",
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
        f"{summary.target}{drafter} · {summary.dtype} on {summary.device} · batch "
        f"{summary.batch_size} · cache {summary.cache_length}",
        style="dim",
    )
    return Group("", Padding(rows, (0, 0, 0, 1)), Padding(conditions, (0, 0, 0, 1)))


def _by_length(steps: Mapping[int, int]) -> str:
    """Return the share of the batch's steps by their number of verified drafts."""
    total = sum(steps.values())
    shares = [f"{v or 'none'} in {count / total:.0%}" for v, count in sorted(steps.items())]
    return f"{', '.join(shares)} of {_count(total, 'step')}, as was quickest"


def _compared(summary: Summary, plain: float) -> Text:
    """Return the speed of plain decoding, and advice if it is faster."""
    line = Text(f"{plain:,.1f} tok/s without the drafter")
    line.append(f" (measured in {summary.plain_measured_s:.1f} s)", "dim")
    if summary.plain_is_faster:
        others = ["fewer --num-draft-tokens"] * (summary.num_draft_tokens > 1)
        others += ["a smaller --batch-size"] * (summary.batch_size > 1)
        line.append("\nspeculation loses here: add --drafter none", "yellow")
        if others:
            line.append(f"; {' or '.join(others)} may help, too", "yellow")
    return line


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _bar(share: float) -> str:
    """Return a bar in eighths of a cell, padded to a fixed width."""
    eighths = round(share * _BAR_WIDTH * 8)
    full, part = divmod(eighths, 8)
    bar = "█" * full + (" ▏▎▍▌▋▊▉"[part] if part else "")
    return bar + "·" * (_BAR_WIDTH - len(bar))


def header(result: PromptResult, number: int, total: int) -> str:
    """Return the line above one of many completions."""
    text = result.request.text
    shown = _ids(result.request.request.prompt_ids) if text is None else text
    shown = shown.replace("\n", "\\n")
    return f"── {number}/{total} ── {shown if len(shown) <= 60 else shown[:59] + '…'}"


def body(result: PromptResult) -> str:
    """Return a completion as text, or as ids without a tokenizer."""
    return _ids(result.done.token_ids) if result.text is None else result.text


def _ids(ids: Sequence[int]) -> str:
    return ",".join(map(str, ids))


class RunProgress:
    """A progress bar for many prompts on standard error, hidden while results are printed.

    It counts tokens, since rows of a batch finish in bursts. Without a terminal it prints a line at
    times.
    """

    def __init__(self, console: Console, budgets: Mapping[Hashable, int]):
        """Start the bar.

        Args:
          budgets: largest number of new tokens of each row, by its id; tokens after an early stop
            count as done.
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
        """Set the number of tokens of a row."""
        self._total += tokens - self._tokens[name]
        self._tokens[name] = tokens
        if finished:
            self._finished += 1
            self._left_over += self._budgets[name] - tokens
        # Prefill gives one token. Then the loop is compiled, which may take longest.
        self._compiling &= tokens <= 1 and self._finished < len(self._budgets)
        shown = "compiling" if self._compiling else f"{self._total:,} tokens"
        prompts = f"{self._finished}/{len(self._budgets)} prompts"
        self._progress.update(
            self._task, completed=self._total + self._left_over, tokens=shown, prompts=prompts
        )
        self._ticker.notify(f"{prompts}, {shown}")

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Hide the bar while the block prints."""
        self._progress.stop()
        try:
            yield
        finally:
            self._progress.start()

    def close(self) -> None:
        """Remove the bar."""
        self._progress.stop()
