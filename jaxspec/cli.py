"""The command line: options and exit codes. What a command does is elsewhere.

JAX and all that needs it are imported only once a command is sure to need them, so that help and mistakes
cost no start-up. Exit codes: 0, all is done; 1, some prompts were refused and the rest is done; 2, a
mistake, one message, nothing done; 130, interrupted.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import jaxspec

app = typer.Typer(
    name="jaxspec",
    help="Speculative decoding of Gemma 4 in JAX.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,  # a traceback of ours is a bug report: plain, and without locals
    context_settings={"help_option_names": ["-h", "--help"]},
)


class UsageError(ValueError):
    """Options that cannot be meant: names the option, what was expected and the way out."""


class Dtype(enum.StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class SamplingSource(enum.StrEnum):
    model = "model"


def main() -> None:
    """Run the command line."""
    app()


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"jaxspec {jaxspec.__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    pass


def _register(name: str, function: str, help_text: str) -> None:
    """Add a command that lives in another module, imported when it is called.

    Args:
      function: "module:name" of a function with Typer annotations.
    """

    def command(arguments: Annotated[list[str] | None, typer.Argument()] = None) -> None:
        module, attribute = function.split(":")
        delegate = typer.Typer(
            add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False
        )
        delegate.command()(getattr(importlib.import_module(module), attribute))
        delegate(args=arguments or [], prog_name=f"jaxspec {name}")

    passed_on = {"ignore_unknown_options": True, "help_option_names": []}
    app.command(name, help=help_text, context_settings=passed_on, add_help_option=False)(command)


_register(
    "convert",
    "checkpoints_convert.cli:convert_command",
    "Convert a Gemma 4 target or a DFlash drafter into an Orbax checkpoint, or back.",
)
_register(
    "bench",
    "jaxspec.bench:bench_command",
    "Measure prefill and decode steps, beside the least they could take.",
)
_register(
    "check",
    "jaxspec.check:check_command",
    "Find out whether a drafter fits a target, and why not.",
)


# --- generate ----------------------------------------------------------------------------------------

_MODELS, _TEXT, _DECODING, _RUNNING = "Models", "Prompts and text", "Decoding", "Running"


@app.command(no_args_is_help=False)
def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="Texts to continue. Without any: standard input, as one prompt."),
    ] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE.jsonl",
            help='Lines of {"prompt": text}, {"prompt_ids": \\[...]} or, with --chat, {"messages": \\[...]}.',
            rich_help_panel=_TEXT,
        ),
    ] = None,
    prompt_ids: Annotated[
        list[str] | None,
        typer.Option(
            metavar="5,6,7",
            help="A prompt as token ids; needs no tokenizer. Repeatable.",
            rich_help_panel=_TEXT,
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Apply the checkpoint's chat template; a prompt is the user's turn.",
            rich_help_panel=_TEXT,
        ),
    ] = False,
    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help='Values for the template, such as {"enable_thinking": true}.',
            rich_help_panel=_TEXT,
        ),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="End before this text. Repeatable.",
            rich_help_panel=_TEXT,
        ),
    ] = None,
    json_path: Annotated[
        str | None,
        typer.Option(
            "--json",
            metavar="PATH|-",
            help="Write one line of JSON a prompt and a summary line, and nothing else to stdout.",
            rich_help_panel=_TEXT,
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|ID",
            help="A directory or hub id of a Gemma 4 model. Default: the bundled one.",
            rich_help_panel=_MODELS,
        ),
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|ID|dflash|mtp|none",
            help="A directory or hub id of a DFlash drafter or an MTP assistant, [bold]dflash[/] or "
            "[bold]none[/]. Default: the bundled one with the bundled target, else none.",
            rich_help_panel=_MODELS,
        ),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(help="Of the target's hub id.", rich_help_panel=_MODELS),
    ] = None,
    drafter_revision: Annotated[
        str | None,
        typer.Option(help="Of the drafter's hub id.", rich_help_panel=_MODELS),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            help="For the hub. Default: the one huggingface_hub knows.",
            rich_help_panel=_MODELS,
        ),
    ] = None,
    offline: Annotated[
        bool,
        typer.Option(
            "--offline",
            help="Use what is in the hub cache, and no network.",
            rich_help_panel=_MODELS,
        ),
    ] = False,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="Of weights and caches. Default: bfloat16 on GPU, float32 on CPU.",
            rich_help_panel=_MODELS,
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="data=2,model=4",
            help="Split rows over so many devices, and models over so many. Default: one device.",
            rich_help_panel=_MODELS,
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="For each prompt.", rich_help_panel=_DECODING)
    ] = 128,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 for greedy. Default: 0.", rich_help_panel=_DECODING),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            min=0, help="Sample among the k likeliest tokens; 0: off.", rich_help_panel=_DECODING
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Sample among the likeliest tokens of this total probability; 1: off.",
            rich_help_panel=_DECODING,
        ),
    ] = None,
    sampling: Annotated[
        SamplingSource | None,
        typer.Option(
            help="Temperature, top-k and top-p of the checkpoint, where not given here.",
            rich_help_panel=_DECODING,
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            max=2**32 - 1,
            help="Each prompt's own is made of this and its place in the list.",
            rich_help_panel=_DECODING,
        ),
    ] = 0,
    stop_id: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N",
            help="End with this token, as with the checkpoint's own end-of-sequence ids. Repeatable.",
            rich_help_panel=_DECODING,
        ),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos",
            help="Do not end with the checkpoint's own end-of-sequence ids.",
            rich_help_panel=_DECODING,
        ),
    ] = False,
    num_draft_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens drafted a step; the newest token, which they follow, never counts. Default: the "
            "drafter's own number.",
            rich_help_panel=_DECODING,
        ),
    ] = None,
    tree_topk: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Draft a tree: each level widens its best nodes, this many, by as many tokens. Needs "
            "--tree-depth and --num-draft-tokens, the nodes to verify: 3, 5 and 11, say.",
            rich_help_panel=_DECODING,
        ),
    ] = None,
    tree_depth: Annotated[
        int | None,
        typer.Option(min=1, help="Levels of that tree.", rich_help_panel=_DECODING),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Prompts decoded together, rounded up to a power of two. Default: all, up to 8.",
            rich_help_panel=_RUNNING,
        ),
    ] = None,
    cache_length: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Positions each cache row holds. Default: what the longest prompt needs, rounded up.",
            rich_help_panel=_RUNNING,
        ),
    ] = None,
    compilation_cache: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|off",
            help="Where compiled programs are kept. Default: the user's cache directory.",
            rich_help_panel=_RUNNING,
        ),
    ] = None,
) -> None:
    """Continue prompts with a Gemma 4 target, several tokens a target pass.

    Without --target, a small bundled pair of target and drafter that writes Python.

      jaxspec generate 'def read_config(path):'

      jaxspec generate --target google/gemma-4-26B-A4B-it --drafter z-lab/gemma-4-26B-A4B-it-DFlash --chat 'Why is the sky blue?'

      jaxspec generate --prompts prompts.jsonl --json out.jsonl
    """
    console = Console(stderr=True, highlight=False)
    with _explained(console, UsageError):
        _check_sampling(temperature, top_p)
        if num_draft_tokens is not None and (drafter == "none" or (target and not drafter)):
            raise UsageError("--num-draft-tokens needs a drafter; give one with --drafter")
        given = [v is not None for v in (tree_topk, tree_depth, num_draft_tokens)]
        if any(given[:2]) and not all(given):
            raise UsageError(
                "a tree needs --tree-topk, --tree-depth and --num-draft-tokens together"
            )
        if "" in (stop or ()):
            raise UsageError("--stop: expected some text, got none")
        template_kwargs = _parse_template_kwargs(chat_template_kwargs, chat=chat)

    from jaxspec.prompts import PromptError, read_prompts

    with _explained(console, PromptError):
        stdin = None if sys.stdin.isatty() else sys.stdin.buffer.read
        given = read_prompts(prompts or (), prompt_ids or (), prompts_file, stdin, chat=chat)

    with _explained(console), console.status("[dim]starting JAX"):
        from jaxspec import generation

    options = generation.Options(
        target=target,
        drafter=drafter,
        revision=revision,
        drafter_revision=drafter_revision,
        token=token,
        offline=offline,
        dtype=dtype.value if dtype else None,
        mesh=mesh,
        chat=chat,
        chat_template_kwargs=template_kwargs,
        stop_texts=tuple(stop or ()),
        stop_ids=tuple(stop_id or ()),
        ignore_eos=ignore_eos,
        max_new_tokens=max_new_tokens,
        sampling_of_model=sampling is not None,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        num_draft_tokens=num_draft_tokens,
        tree=(tree_topk, tree_depth) if tree_topk and tree_depth else None,
        batch_size=batch_size,
        cache_length=cache_length,
        compilation_cache=compilation_cache,
        json_path=json_path,
    )
    with _explained(console, *generation.USER_ERRORS):
        refused = generation.run(given, options, console)
    if refused:
        raise typer.Exit(1)


def _check_sampling(temperature: float | None, top_p: float | None) -> None:
    if temperature is not None and not 0 <= temperature < math.inf:
        raise UsageError(f"--temperature is {temperature}; expected 0 (greedy) or more")
    if top_p is not None and not 0 < top_p <= 1:
        raise UsageError(f"--top-p is {top_p}; expected more than 0 and at most 1 (off)")


def _parse_template_kwargs(given: str | None, *, chat: bool) -> dict[str, Any]:
    if given is None:
        return {}
    if not chat:
        raise UsageError("--chat-template-kwargs needs --chat")
    try:
        values = json.loads(given)
    except ValueError as error:
        raise UsageError(f"--chat-template-kwargs is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise UsageError(
            '--chat-template-kwargs: expected a JSON object, such as {"enable_thinking": true}'
        )
    return values


@contextlib.contextmanager
def _explained(console: Console, *mistakes: type[Exception]) -> Iterator[None]:
    """End the run with one message and no traceback on a mistake of the user's, or on Ctrl-C."""
    try:
        yield
    except mistakes as error:
        message, code = f"error: {error}", 2
    except KeyboardInterrupt:
        message, code = "interrupted", 130
    else:
        return
    console.print(message, style="red", markup=False, soft_wrap=True)
    raise typer.Exit(code)
