"""Records as options: a new field is a new flag, values are read by their type, errors name flags."""

from __future__ import annotations

import dataclasses
import inspect
import io
import time
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from jaxspec.commands import startup
from jaxspec.commands.bench.command import bench_command
from jaxspec.commands.check.command import check_command
from jaxspec.commands.cli import OTHER_NAMES, app
from jaxspec.commands.generate.command import generate
from jaxspec.commands.models import Quantized
from jaxspec.commands.options import (
    Fields,
    PartialRecord,
    UsageError,
    as_flag,
    command,
    error_message,
    explained,
)
from jaxspec.commands.progress import ticking
from jaxspec.options import VALUES, Drafting, FieldError, Range, Sampling, Tree, at_least, option
from jaxspec.registry import presets
from jaxspec.weights.loading import CheckpointError
from tests.commands.conftest import Run


@dataclasses.dataclass(frozen=True)
class Inner:
    width: int = option(dataclasses.MISSING, "Its width.", range=at_least(1))
    height: int = option(dataclasses.MISSING, "Its height.", range=at_least(1))


@dataclasses.dataclass(frozen=True)
class Everything:
    """A record with a field of every type that is read."""

    count: int = option(3, "How many.", range=Range("1 to 9", lambda x: (x >= 1) & (x <= 9), 1, 9))
    share: float = option(0.5, "How much.", range=Range("in [0, 1]", lambda x: (x >= 0) & (x <= 1)))
    kind: Literal["round", "square"] = option("round", "What.")
    file: Path | None = option(None, "Where.", metavar="FILE", flag="--from")
    fast: bool = option(False, "Hurry.")
    ids: tuple[int, ...] = option((), "Which.", flag="--id", range=at_least(0))
    biases: Mapping[int, float] = option({}, "By how much.")
    values: Mapping[str, Any] | None = option(None, "Anything.")
    box: Inner | None = option(None, "A box.", needs=("hidden",))
    hidden: str | None = option(None, "Not asked.", secret=True)


ALL = Fields()


def outcome(*args: str, of: Any = Everything, fields: Fields = ALL) -> tuple[Any, str, int]:
    """Return what a command was called with, what it said, and its exit code."""
    called: list[Any] = []

    def take(record: Any, word: str = "none") -> None:
        called.append((record, word))

    take.__annotations__ = {"record": Annotated[of, fields], "word": str, "return": None}
    app = typer.Typer()
    app.command()(command(take))
    done = CliRunner().invoke(app, list(args))
    return (called[0] if called else None), done.output, done.exit_code


def test_without_options_a_record_is_its_defaults() -> None:
    assert outcome()[0] == (Everything(), "none")


def test_values_are_read_by_the_types_of_the_fields() -> None:
    flags = "--count 4 --share 0.25 --kind square --from a/b --fast --id 5 --id 7 --word yes"
    more = "--biases 3=-2 --values {} --box-width 2 --box-height 6 --hidden x"
    record, word = outcome(*flags.split(), *more.split(), "--biases", '{"4": 1.5}')[0]
    assert word == "yes"
    assert record == Everything(
        count=4,
        share=0.25,
        kind="square",
        file=Path("a/b"),
        fast=True,
        ids=(5, 7),
        biases={3: -2.0, 4: 1.5},
        values={},
        box=Inner(2, 6),
        hidden="x",
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--count", "10"], "--count"),
        (["--share", "1.5"], "error: --share is 1.5; it must be in [0, 1]"),
        (["--id", "-1"], "--id"),
        (["--kind", "oval"], "--kind"),
        (["--biases", "5"], "--biases 5: expected ID=VALUE"),
        (["--values", "[]"], "--values: expected a JSON object"),
        (
            ["--box-width", "2", "--hidden", "4"],
            "error: a box needs --box-width, --box-height and --hidden together",
        ),
        (
            ["--box-width", "2", "--box-height", "4"],
            "error: a box needs --box-width, --box-height and --hidden together",
        ),
        (["--box-width", "0"], "--box-width"),
    ],
)
def test_mistakes_name_the_flag(args: list[str], message: str) -> None:
    called, printed, code = outcome(*args)
    assert (called, code) == (None, 2)
    assert message in " ".join(printed.replace("│", " ").split())


def test_a_command_chooses_among_the_fields() -> None:
    help_text = outcome("--help", fields=Fields(only=("count", "box")))[1]
    assert "--box-height" in help_text
    assert "--share" not in help_text
    assert "--hidden" not in outcome("--help", fields=Fields(without=("hidden",)))[1]


def test_what_was_given_is_told_from_defaults() -> None:
    (given, _), _, code = outcome(
        "--temperature", "0", "--top-p", "0.5", of=PartialRecord[Sampling]
    )
    assert code == 0
    assert given.values == {"temperature": 0.0, "top_p": 0.5}
    assert given.over({"temperature": 0.7, "top_k": 9}) == Sampling(0.0, 9, 0.5)
    called, printed, code = outcome("--min-p", "2", of=PartialRecord[Sampling])
    assert (called, code) == (None, 2)
    assert "error: --min-p is 2; it must be in [0, 1]; 0: off" in printed


def names_of(record: type, *without: str) -> set[str]:
    return {f.name for f in dataclasses.fields(record)} - set(without)


def test_commands_have_an_option_for_every_field() -> None:
    """Nobody lists the fields a second time, so that a new one is an option by itself."""
    tree = {f"tree_{name}" for name in names_of(Tree)}
    drafting = names_of(Drafting, "tree", "synthetic_acceptance") | tree
    options = set(inspect.signature(generate).parameters)
    assert names_of(Sampling) | drafting <= options
    assert "synthetic_acceptance" not in options
    options = set(inspect.signature(bench_command).parameters)
    assert names_of(Drafting, "tree") | tree <= options
    assert set(VALUES) <= options
    assert not options & (names_of(Sampling) - set(VALUES))
    hub = {"revision", "drafter_revision", "token", "offline"}
    assert hub <= options
    options = set(inspect.signature(check_command).parameters)
    assert hub <= options
    assert options & names_of(Drafting) == {"num_draft_tokens"}


@pytest.mark.parametrize(
    "args",
    [
        ["generate", "a", "--target", "a/b", "--drafter", "c/d"],
        ["check", "a/b", "c/d"],
        ["bench", "--target", "a/b", "--drafter", "c/d"],
    ],
    ids=lambda args: args[0],
)
def test_every_command_loads_as_it_is_told(
    invoke: Run, monkeypatch: pytest.MonkeyPatch, args: list[str]
) -> None:
    """The options of models are one record, so that no command forgets some."""
    seen: dict[str, Any] = {}

    def load(target: str, drafter: str, **options: Any) -> None:
        seen.update(options, target=target, drafter=drafter)
        raise CheckpointError("seen")

    monkeypatch.setattr(startup, "load", load)
    hub = "--revision r --drafter-revision s --token t --offline --dtype bfloat16"
    outcome = invoke(*args, *hub.split())
    assert (outcome.code, outcome.stderr.strip()) == (2, "error: seen")
    assert seen == {
        "target": "a/b",
        "drafter": "c/d",
        "revision": "r",
        "drafter_revision": "s",
        "token": "t",
        "read_weights": True,
        "vision": args[0] == "generate",
        "offline": True,
        "dtype": "bfloat16",
        "mesh": None,
        "quantize": None,
        "quantize_head": None,
        "quantize_vision": None,
        "quantize_drafter": None,
        "quantize_draft_head": None,
        "kv_dtype": None,
    }


def test_every_option_has_a_help_text() -> None:
    for run in (generate, bench_command, check_command):
        for parameter in inspect.signature(run).parameters.values():
            assert parameter.annotation.__metadata__[0].help, parameter.name


def test_fields_become_flags() -> None:
    assert as_flag("num_draft_tokens") == "--num-draft-tokens"
    assert as_flag("cache_length", 77) == "--cache-length 77"
    assert as_flag("tree") == "--tree-topk and --tree-depth"
    assert as_flag("tree depth", 4) == "--tree-depth 4"
    error = FieldError(
        "top_k", lambda name: f"{name('top_k', 3)} or {name('verification', 'block')}"
    )
    assert error_message(error) == "--top-k 3 or --verification block"
    assert str(error) == 'top_k=3 or verification="block"'


def test_an_interrupt_ends_every_command_alike(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, explained(interrupted="x was not written"):
        raise KeyboardInterrupt
    assert ended.value.exit_code == 130
    assert capsys.readouterr().err == "interrupted; x was not written\n"


def test_help_names_every_choice() -> None:
    """What an option can be is in its help, not in a refusal."""
    for name, choices in {
        "generate": ["<float32|bfloat16>", "<standard|block>", "dflash|mtp|ngram|none", "DIR|off"],
        "check": ["<float32|bfloat16>", "bundled", "dflash", "mtp"],
        "bench": [
            "<float32|bfloat16>",
            "<standard|block>",
            *presets(),
            "dspark, mtp, ngram or none",
        ],
        "convert": ["float32|bfloat16"],
    }.items():
        shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "400"}).output
        missing = [choice for choice in choices if choice not in shown]
        assert not missing, name


def test_defaults_look_alike_and_formats_are_listed_once() -> None:
    """Some were "[default: 0]", some a sentence; and thirteen formats stood at each of four options."""
    for name in ("generate", "check", "bench", "eval", "convert", "serve"):
        shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "4000"}).output
        assert "[default" not in shown, name
        assert shown.count("int4-g128-zeros") == 1, name
        (line,) = (x for x in shown.splitlines() if "int4-g128-zeros" in x)
        assert all(fmt in line for fmt in typing.get_args(Quantized))
    help_text = " ".join(outcome("--help")[1].replace("│", " ").split())
    for sentence in ("How many. Default: 3.", "How much. Default: 0.5.", "What. Default: round."):
        assert sentence in help_text
    assert "Hurry. Default" not in help_text


@pytest.mark.parametrize(
    ("args", "answer"),
    [
        ("generate --model a", "--target"),
        ("generate --max-tokens 5", "--max-new-tokens"),
        ("serve --model a", "the argument TARGET"),
        ("serve --target a", "the argument TARGET"),
        ("convert --model a", "the argument SRC"),
        ("serve --max-num-seqs 4", "--slots"),
        ("check --model a", "the argument TARGET"),
        ("check --max-tokens 5", "--new-tokens"),
        ("bench --model=a", "--target"),
        ("generate --max-model-len 99", "--cache-length"),
    ],
)
def test_options_of_other_programs_are_answered_with_ours(args: str, answer: str) -> None:
    done = CliRunner().invoke(app, args.split(), env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert f"(Possible options: {answer})" in done.output


def test_names_of_other_programs_are_not_ours() -> None:
    commands: Any = typer.main.get_command(app)
    every = [{name for p in of.params for name in p.opts} for of in commands.commands.values()]
    for ours, theirs in OTHER_NAMES.items():
        having = [own for own in every if own & set(ours.split())]
        assert set(ours.split()) <= set().union(*having), ours
        assert not set(theirs.split()) & set().union(*having), theirs


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("generate a --dtype float16", "float16: bfloat16 takes as little memory"),
        ("generate a --dtype int8", "for weights in int8 leave it out, and add --quantize int8"),
        ("convert a b --dtype int8", "add --quantize int8"),
        ("bench --dtype auto", "--dtype is float32 or bfloat16, not auto: leave it out"),
        ("check --kv-dtype int8", "--kv-dtype is bfloat16, float32 or fp8, not int8: fp8 takes"),
        ("serve --quantize int3", "nvfp4 or mxfp4, not int3"),
    ],
)
def test_a_refused_dtype_says_what_to_use(args: str, message: str) -> None:
    done = CliRunner().invoke(app, args.split())
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


@pytest.mark.parametrize(
    "name", ["generate a", "check", "bench", "eval humaneval", "serve --port 0", "convert a b"]
)
def test_every_command_keeps_its_programs(
    invoke: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Those of bench were kept only where JAX_COMPILATION_CACHE_DIR was set."""

    def kept(path: str | None, console: Console) -> None:
        raise UsageError(f"kept in {path}")

    monkeypatch.setattr(startup, "set_compilation_cache", kept)
    given = () if name.startswith("convert") else ("--compilation-cache", "here")
    outcome = invoke(*name.split(), *given)
    assert outcome.code == 2
    assert outcome.stderr.strip() == f"error: kept in {given[1] if given else None}"


def test_long_work_says_what_it_does_while_nothing_returns() -> None:
    """A compilation takes minutes in one call, and where standard error is no terminal no spinner turns."""
    text = io.StringIO()
    with ticking(Console(file=text, width=80), every_s=0.01) as notify:
        notify("compiling")
        time.sleep(0.3)
    assert text.getvalue().startswith("compiling (0 s since the start)\n")
    on_a_terminal = io.StringIO()
    with ticking(Console(file=on_a_terminal, force_terminal=True), every_s=0.01) as notify:
        notify("compiling")
        time.sleep(0.1)
    assert on_a_terminal.getvalue() == ""


def test_caches_longer_than_the_model_has_positions_are_refused(invoke: Run) -> None:
    longer = ("--prompt-ids", "2,5", "--cache-length", "99999")
    done = invoke("generate", "--target", "target", *longer)
    assert done.code == 2
    assert "--cache-length 99999: the target has " in done.stderr
    assert "pass at most " in done.stderr
