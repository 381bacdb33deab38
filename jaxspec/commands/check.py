"""`jaxspec check`: does this drafter fit this target, and if not, why not?

A drafter with one convention wrong raises no error: its drafts are just never accepted. Read `run`. The
target continues some text greedily; then both models read it again (teacher forcing), and at every
position of the continuation the drafter drafts from the true context. Draft j is accepted there when
drafts 1 to j are the target's own next tokens, so what is counted is what decoding would accept. Other
readings of the drafter are held against the one in force on the same positions (`replay`).
"""

from __future__ import annotations

import dataclasses
import enum
import importlib.metadata
import json
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from rich import box
from rich.console import Console, Group
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text as Line

import jaxspec
from jaxspec.api import BUNDLED, default_dtype, load
from jaxspec.commands.conventions import Convention, in_force
from jaxspec.commands.generation import (
    as_flags,
    out_of_memory_explained,
    set_compilation_cache,
    shorten,
    use_one_thread,
)
from jaxspec.commands.replay import (
    LEVEL,
    MATERIAL,
    Comparison,
    Estimate,
    Round,
    Text,
    row_means,
    search,
)
from jaxspec.commands.report import json_lines, write_line
from jaxspec.engine import Completion, Engine, Request
from jaxspec.loading import LoadedModel
from jaxspec.tokenizer import Tokenizer

FLOOR = 0.3
"""Least share of first drafts that must be accepted. Below it even a drafter that keeps its rate at every
position adds less than 0.43 tokens a step, about what drafting and verifying cost. Sound drafters have 0.6
to 0.9, mute ones less than 0.1."""

NEAR_TIE_GAP = 1e-4  # float32: closer logits may swap when a pass has another shape
NEAR_TIE_ULPS = 4  # bfloat16: likewise, in units of the last place of the larger logit
PROMPT_TOKENS = 64  # of a row cut from a text
FEWEST_TOKENS, FEWEST_ROWS = 8, 4  # a row's text, and rows for an interval

PROMPTS = (
    "Explain how a binary search finds an item in a sorted list.",
    "def merge(first, second):\n    result = []\n    while first and second:\n",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser(",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey? Think step by step.",
    "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "Name five rivers in Europe and say where each of them ends.",
    "for index, line in enumerate(lines):\n    if line.startswith('#'):\n        continue\n",
    "What is the difference between a virus and a bacterium?",
    "def test_parse():\n    result = parse('a = 1')\n    assert result ==",
    "Give me a recipe for a simple vegetable soup, with amounts for four people.",
    "try:\n    with open(path) as file:\n        data = file.read()\nexcept OSError as error:\n",
    "Summarise the water cycle in three sentences.",
    "    def __repr__(self):\n        return '%s(%r)' % (self.__class__.__name__, self.",
    "Translate into French: the library closes at six, but the reading room stays open.",
    "def factorial(n):\n    if n < 0:\n        raise ValueError(",
)


class Dtype(enum.StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class CheckError(ValueError):
    """A pair or a text that cannot be checked; says what would do."""


def check_command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", help="A Gemma 4 model: a directory, a hub id, or [bold]bundled[/]."
        ),
    ] = "bundled",
    drafter: Annotated[
        str | None,
        typer.Argument(
            metavar="DRAFTER",
            help="A drafter: a directory, a hub id, or the name of a bundled one. Default, with the "
            "bundled target: dflash.",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Text whose pieces the target continues. Default: held-out prompts of the bundled "
            "target, a few prompts of our own for others.",
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=FEWEST_ROWS, help="Pieces of text, at most.")] = 16,
    new_tokens: Annotated[
        int, typer.Option(min=2, help="Tokens that the target adds to each.")
    ] = 64,
    num_draft_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a draft. Default: as many as in generate."),
    ] = None,
    floor: Annotated[
        float,
        typer.Option(min=0, max=1, help="Least share of first drafts that must be accepted."),
    ] = FLOOR,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Of weights and caches. Default: bfloat16 on GPU, float32 on CPU."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows at a time.")] = 8,
    json_path: Annotated[
        str | None,
        typer.Option(
            "--json",
            metavar="PATH|-",
            help="Also write everything as one line of JSON; with - the rest goes to standard error.",
        ),
    ] = None,
) -> None:
    """Find out whether a drafter fits a target, and why not.

    Shows every convention in force and where it came from, how many drafts
    are accepted at each position, whether another convention does better, and
    whether the output equals plain decoding. Exit code 0: sound; 1: not; 2: a
    mistake, nothing was checked.

      jaxspec check

      jaxspec check google/gemma-4-26B-A4B-it z-lab/gemma-4-26B-A4B-it-DFlash --text mine.txt
    """
    errors = Console(stderr=True, highlight=False)
    console = errors if json_path == "-" else Console(highlight=False)
    try:
        with json_lines(json_path or "-") as file, out_of_memory_explained():
            set_compilation_cache(None, errors)
            if target == "bundled":
                use_one_thread()
            with errors.status("[dim]loading the models"):
                pair = load_pair(target, drafter, dtype.value if dtype else default_dtype())
            with errors.status("[dim]encoding") as status:
                report = run(
                    *pair,
                    prompts_for(pair[0], text, rows),
                    new_tokens=new_tokens,
                    num_draft_tokens=num_draft_tokens,
                    floor=floor,
                    batch_size=batch_size,
                    say=lambda message: status.update(f"[dim]{message}"),
                )
            console.print(shown(report))
            if json_path is not None:
                write_line(file, report.to_json())
    except (ValueError, OSError) as error:
        errors.print(f"error: {as_flags(str(error))}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    if report.problems:
        raise typer.Exit(1)


def load_pair(target: str, drafter: str | None, dtype: str) -> tuple[LoadedModel, LoadedModel]:
    """Load both models.

    Raises:
      ValueError: one is missing, or they do not fit each other.
    """
    if drafter == "none" or (drafter is None and target != "bundled"):
        raise CheckError("check needs a drafter: jaxspec check TARGET DRAFTER")
    loaded, loaded_drafter = load(None if target == "bundled" else target, drafter, dtype=dtype)
    assert loaded_drafter is not None
    loaded_drafter.config.check_fits(loaded.config)
    return loaded, loaded_drafter


# --- the text ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompts:
    """What the target is to continue, and where that comes from."""

    origin: str
    ids: Sequence[tuple[int, ...]]


def prompts_for(target: LoadedModel, text: Path | None, rows: int) -> Prompts:
    """Choose prompts: pieces of the text given, else held-out ones, else our own.

    Raises:
      CheckError, TokenizerError: the text cannot be read, or is too short.
    """
    if text is None and target.directory == BUNDLED / "target":
        held_out = json.loads((BUNDLED / "held_out.json").read_text())["prompts"]
        return Prompts("held-out prompts", [tuple(p["ids"]) for p in held_out[:rows]])
    tokenizer = Tokenizer.load(target.directory)
    if text is not None:
        try:
            ids = tokenizer.encode(text.read_text(encoding="utf-8"))
            return Prompts(f"pieces of {text}", cut(ids, tokenizer.bos_token_id, rows))
        except OSError as error:
            raise CheckError(f"cannot read {text}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise CheckError(f"{text} is not UTF-8 text: {error}") from None
        except CheckError as error:
            raise CheckError(f"{text}: {error}") from None
    if tokenizer.chat_template is None:
        return Prompts("prompts of our own", [tokenizer.encode(p) for p in PROMPTS[:rows]])
    turns = ([{"role": "user", "content": p}] for p in PROMPTS[:rows])
    return Prompts("prompts of our own, as chats", [tokenizer.apply_chat(turn) for turn in turns])


def cut(ids: Sequence[int], bos: int | None, rows: int) -> list[tuple[int, ...]]:
    """Cut up to `rows` pieces of equal length, evenly spaced, out of a text; each gets its own BOS."""
    head = () if bos is None else (bos,)
    body = tuple(ids[len(head) :])
    rows = min(rows, len(body) // FEWEST_TOKENS)
    if rows < FEWEST_ROWS:
        raise CheckError(
            f"the text has {len(body)} tokens; check needs {FEWEST_ROWS * FEWEST_TOKENS} or more"
        )
    length = min(PROMPT_TOKENS - len(head), len(body) // rows)
    starts = np.linspace(0, len(body) - length, rows).astype(int)
    return [(*head, *body[i : i + length]) for i in starts]


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
    wrong = [f"row {i}: {error}" for i, r in enumerate(requests) if (error := engine.check(r))]
    if wrong:
        raise CheckError("\n".join(wrong))
    done = [event for event in engine.run(requests) if isinstance(event, Completion)]
    return sorted(done, key=lambda completion: completion.index)


# --- losslessness ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Differing:
    """Where speculative decoding first wrote something else than plain decoding.

    Attributes:
      position: of the token in its row.
      gap: between the target's logits of the two, on reading the row anew.
      gap_ulps: the same in units of bfloat16's last place.
    """

    row: int
    position: int
    plain_token: int
    speculative_token: int
    plain_logit: float
    speculative_logit: float
    gap: float
    gap_ulps: float
    near_tie: bool

    @classmethod
    def of(
        cls, row: int, position: int, tokens: tuple[int, int], logits: np.ndarray, dtype: str
    ) -> Differing:
        plain, speculative = (float(logits[token]) for token in tokens)
        gap = abs(plain - speculative)
        largest = max(abs(plain), abs(speculative), float(jnp.finfo(jnp.bfloat16).tiny))
        ulps = gap / 2.0 ** (math.floor(math.log2(largest)) - jnp.finfo(jnp.bfloat16).nmant)
        near = gap < NEAR_TIE_GAP if dtype == "float32" else ulps <= NEAR_TIE_ULPS
        return cls(row, position, *tokens, plain, speculative, gap, ulps, near)


def first_differences(
    plain: Sequence[Completion], speculative: Sequence[Completion]
) -> dict[int, int]:
    """Return, for each row that differs, how many tokens agree before that."""
    found = {}
    for row, (one, other) in enumerate(zip(plain, speculative, strict=True)):
        if one.token_ids != other.token_ids:
            pairs = zip(one.token_ids, other.token_ids, strict=False)
            found[row] = next(i for i, (a, b) in enumerate(pairs) if a != b)
    return found


# --- the whole check ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """Everything that was found.

    Attributes:
      by_position: share of anchors whose drafts 1 to j were all accepted, for j = 1, 2, ...
      accepted: drafts accepted an anchor, each position of the text being one.
      acceptance_length: tokens a verify step of decoding itself, over all steps.
      problems: what is wrong and what to change; none when the pair is sound.
    """

    target: str
    drafter: str
    dtype: str
    device: str
    text: str
    rows: int
    anchors: int
    new_tokens: int
    num_draft_tokens: int
    batch_size: int
    replay_bytes: int
    conventions: list[Convention]
    by_position: list[Estimate]
    accepted: Estimate
    acceptance_length: float
    rounds: list[Round]
    differing: list[Differing]
    floor: float
    problems: list[str]

    @property
    def verdict(self) -> str:
        if self.problems:
            return f"not sound: {'; '.join(self.problems)}"
        return (
            f"sound: {self.by_position[0].mean:.0%} of first drafts are accepted, "
            f"{self.acceptance_length:.2f} tokens a step, no other convention does better, and the output "
            "is that of plain decoding"
        )

    def to_json(self) -> dict[str, Any]:
        """Return all values, and what they depend on."""
        packages = ("jax", "jaxlib", "flax", "numpy")
        return {
            **dataclasses.asdict(self),
            "confidence": LEVEL,
            "correction": "Bonferroni, over the comparisons of a round",
            "material": MATERIAL,
            "sound": not self.problems,
            "verdict": self.verdict,
            "versions": {
                "jaxspec": jaxspec.__version__,
                "python": platform.python_version(),
                **{name: importlib.metadata.version(name) for name in packages},
            },
        }


def run(
    target: LoadedModel,
    drafter: LoadedModel,
    prompts: Prompts,
    *,
    new_tokens: int,
    num_draft_tokens: int | None,
    floor: float,
    batch_size: int,
    say: Callable[[str], None] = lambda _: None,
) -> Report:
    """Check a pair.

    Args:
      prompts: at least `FEWEST_ROWS`.
      say: called with what is being done.

    Raises:
      CheckError: the pair or the text cannot be checked.
    """
    batch_size = min(batch_size, len(prompts.ids))
    say("the target continues the text, with drafts")
    options = dict(batch_size=batch_size, num_draft_tokens=num_draft_tokens)
    speculative = decode_greedily(target, drafter, prompts.ids, new_tokens, **options)
    say("the same, without")
    plain = decode_greedily(target, None, prompts.ids, new_tokens, batch_size=batch_size)
    drafts = num_draft_tokens or drafter.graph.bind_abstract().default_draft_tokens

    enough = [i for i, c in enumerate(plain) if len(c.token_ids) > drafts]
    if len(enough) < FEWEST_ROWS:
        raise CheckError(
            f"{len(enough)} of {len(plain)} rows go on for more than the {drafts} tokens of a draft; check "
            f"needs {FEWEST_ROWS}: raise --new-tokens, or give other text with --text"
        )
    differences = first_differences(plain, speculative)
    kept = [*enough, *(i for i in differences if i not in enough)]
    text = Text.of([prompts.ids[i] for i in kept], [plain[i] for i in kept])
    judged = np.asarray([text.starts[n] - 1 + differences.get(i, 0) for n, i in enumerate(kept)])
    anchors = text.anchors(drafts)[: len(enough)]
    found = search(
        target,
        drafter,
        text,
        anchors,
        judged,
        num_draft_tokens=drafts,
        batch_size=batch_size,
        say=say,
    )
    differing = [
        Differing.of(
            i,
            int(text.starts[n]) + differences[i],
            (plain[i].token_ids[differences[i]], speculative[i].token_ids[differences[i]]),
            found.replayed.logits[n],
            target.graph.dtype,
        )
        for n, i in enumerate(kept)
        if i in differences
    ]
    by_position = [
        Estimate.of(row_means(found.accepted >= j, anchors)).within(0, 1)
        for j in range(1, drafts + 1)
    ]
    best_first = float(row_means(found.best_accepted >= 1, anchors).mean())
    return Report(
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


# --- the report --------------------------------------------------------------------------------------

_BAR_WIDTH = 32


def shown(report: Report) -> Group:
    """Return the report for a terminal, 80 columns wide, the verdict last."""
    lossless = "greedy speculative decoding wrote every row as plain decoding did"
    if report.differing:
        lossless = f"rows that differ from plain decoding: {len(report.differing)}"
    verdict = Line(report.verdict, "bold red" if report.problems else "bold green")
    return Group(
        Line(f"{report.target} + {report.drafter} · {report.dtype} on {report.device}", "bold"),
        _conventions_table(report),
        _acceptance_chart(report),
        *(_comparisons_table(r, report) for r in report.rounds),
        Line(f"{lossless} ({report.dtype})", "" if report.differing else "green"),
        *(Line(f"  {_difference(d)}") for d in report.differing),
        Line(
            f"held beside the weights while reading: {decimal(report.replay_bytes)} of K/V and features for "
            f"a batch of {min(report.batch_size, report.rows)} rows",
            "dim",
        ),
        "",
        verdict,
    )


def _conventions_table(report: Report) -> Table:
    table = Table(title="conventions in force", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("convention", "value", "set by"):
        table.add_column(name, overflow="fold", style="dim" if name == "set by" else "")
    for c in report.conventions:
        table.add_row(c.name, Line(c.shown), Line(c.origin))
    return table


def _acceptance_chart(report: Report) -> Group:
    """Draw the share of anchors at which drafts 1 to j were all accepted, for each j."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", justify="right")
    for j, share in enumerate(report.by_position, 1):
        interval = f" {share.mean:4.0%}  ({share.low:.0%}-{share.high:.0%})"
        rows.add_row(f"draft {j}", Line(bar(share), "green").append(interval, ""))
    a = report.accepted
    text = (
        f"[bold]{a.mean:.2f}[/] drafts accepted a position ({a.low:.2f}-{a.high:.2f}), "
        f"[bold]{report.acceptance_length:.2f}[/] tokens a step in decoding\n"
        f"[dim]{report.text}, continued by the target: {report.rows} rows, {report.anchors:,} positions; "
        f"{LEVEL:.0%} intervals over rows; floor of draft 1: {report.floor:.0%}[/]"
    )
    return Group("accepted up to this draft", rows, text)


def bar(share: Estimate) -> str:
    """Draw a share: full up to the low end of its interval, shaded up to the high end."""
    low, high = round(share.low * _BAR_WIDTH), round(share.high * _BAR_WIDTH)
    return "█" * low + "▒" * (high - low) + "·" * (_BAR_WIDTH - high)


def _comparisons_table(r: Round, report: Report) -> Table:
    found = [c.name for c in r.comparisons if c.better]
    lines = [
        (f"better: {', '.join(found)}" if found else "no other convention does better")
        + f". Drafts accepted a position; intervals are paired over {report.rows} rows and hold together "
        f"at {LEVEL:.0%} (Bonferroni: {r.level:.1%} each); better: all above 0, and {MATERIAL:.0%} more "
        "tokens a step.",
        *(f"left out: {reason}" for reason in r.left_out),
    ]
    table = Table(
        title=Line(f"other conventions, against: {r.in_force}"),
        caption=Line("\n".join(lines)),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for name in ("convention", "accepted", "difference", "interval", ""):
        table.add_column(name, justify="right" if name in ("accepted", "difference") else "left")
    for c in r.comparisons:
        d = c.difference
        word = "better" if c.better else "worse" if d.high < 0 else "no difference"
        word = "higher" if d.low > 0 and not c.better else word
        style = {"better": "bold red", "worse": "dim"}.get(word, "")
        values = (f"{c.accepted:.2f}", f"{d.mean:+.3f}", f"{d.low:+.3f} to {d.high:+.3f}", word)
        table.add_row(Line(c.name), *values, style=style)
    return table


def _difference(d: Differing) -> str:
    return (
        f"row {d.row}, position {d.position}: token {d.plain_token} (logit {d.plain_logit:.5g}) became "
        f"{d.speculative_token} ({d.speculative_logit:.5g}), {d.gap_ulps:.2g} bf16 ulps apart: "
        f"{'a near-tie' if d.near_tie else 'NO near-tie'}"
    )
