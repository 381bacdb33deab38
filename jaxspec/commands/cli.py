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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import jaxspec
from jaxspec.ranges import refusal

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


class Verification(enum.StrEnum):
    standard = "standard"
    block = "block"


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
    "jaxspec.commands.convert:convert_command",
    "Convert a Gemma 4 target or a DFlash drafter into an Orbax checkpoint, or back.",
)
_register(
    "bench",
    "jaxspec.commands.bench.measure:bench_command",
    "Measure prefill and decode steps, beside the least they could take.",
)
_register(
    "check",
    "jaxspec.commands.check.run:check_command",
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
    logprobs: Annotated[
        bool,
        typer.Option(
            "--logprobs",
            help="With --json: the log-probability of every token, under the target as it is and under what "
            "was sampled from.",
            rich_help_panel=_TEXT,
        ),
    ] = False,
    top_logprobs: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="--logprobs, and those of the target's N best tokens in the place of each.",
            rich_help_panel=_TEXT,
        ),
    ] = 0,
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
    distributed: Annotated[
        bool,
        typer.Option(
            "--distributed",
            help="With --mesh: this is one of several processes, each started with this same command by Slurm, "
            "Open MPI or Kubernetes; the mesh is over the devices of all, and the first one writes.",
            rich_help_panel=_MODELS,
        ),
    ] = False,
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
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Sample among tokens that are at least so likely as this times the likeliest; 0: off.",
            rich_help_panel=_DECODING,
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            help="Divide what speaks for tokens of prompt and output by this; 1: off.",
            rich_help_panel=_DECODING,
        ),
    ] = None,
    presence_penalty: Annotated[
        float,
        typer.Option(
            help="Subtract this from the logits of tokens of the output.", rich_help_panel=_DECODING
        ),
    ] = 0.0,
    frequency_penalty: Annotated[
        float,
        typer.Option(
            help="Subtract this for every time that a token is in the output.",
            rich_help_panel=_DECODING,
        ),
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID=VALUE|JSON",
            help='Add this to the logit of a token: 17=-2.5, repeatable, or {"17": -2.5, "4": 1}.',
            rich_help_panel=_DECODING,
        ),
    ] = None,
    ban_token: Annotated[
        list[int] | None,
        typer.Option(
            metavar="ID", help="Never generate this token. Repeatable.", rich_help_panel=_DECODING
        ),
    ] = None,
    sampling: Annotated[
        SamplingSource | None,
        typer.Option(
            help="Temperature, top-k, top-p, min-p and repetition penalty of the checkpoint, where not "
            "given here.",
            rich_help_panel=_DECODING,
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            max=2**32 - 1,
            help="Each completion's own is made of this and its place in the list.",
            rich_help_panel=_DECODING,
        ),
    ] = 0,
    num_samples: Annotated[
        int,
        typer.Option(
            min=1,
            help="Completions of each prompt; each reads the prompt for itself.",
            rich_help_panel=_DECODING,
        ),
    ] = 1,
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
    draft_sampling: Annotated[
        bool,
        typer.Option(
            "--draft-sampling",
            help="When sampling, let the drafter draw its tokens too, instead of proposing its best.",
            rich_help_panel=_DECODING,
        ),
    ] = False,
    verification: Annotated[
        Verification,
        typer.Option(
            help="When sampling, judge drafts one by one, or a block at a time, which accepts more.",
            rich_help_panel=_DECODING,
        ),
    ] = Verification.standard,
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
        _check_ranges(
            temperature=temperature,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
        )
        biases = _parse_logit_bias(logit_bias or ())
        wanting = {
            "--num-draft-tokens": num_draft_tokens is not None,
            "--draft-sampling": draft_sampling,
            "--verification block": verification is Verification.block,
        }
        wanting = [flag for flag in wanting if wanting[flag]]
        if wanting and (drafter == "none" or (target and not drafter)):
            raise UsageError(f"{wanting[0]} needs a drafter; give one with --drafter")
        if distributed and not mesh:
            raise UsageError("--distributed needs --mesh: how to split over the devices of all")
        if (logprobs or top_logprobs) and not json_path:
            raise UsageError(
                f"{'--logprobs' if logprobs else '--top-logprobs'} needs --json, which they are written with"
            )
        given = [v is not None for v in (tree_topk, tree_depth, num_draft_tokens)]
        if any(given[:2]) and not all(given):
            raise UsageError(
                "a tree needs --tree-topk, --tree-depth and --num-draft-tokens together"
            )
        if "" in (stop or ()):
            raise UsageError("--stop: expected some text, got none")
        template_kwargs = _parse_template_kwargs(chat_template_kwargs, chat=chat)

    from jaxspec.commands.generate.prompts import PromptError, read_prompts

    with _explained(console, PromptError):
        stdin = None if sys.stdin.isatty() else sys.stdin.buffer.read
        given = read_prompts(prompts or (), prompt_ids or (), prompts_file, stdin, chat=chat)

    with _explained(console), console.status("[dim]starting JAX"):
        from jaxspec.commands.generate import run as generation

    options = generation.Options(
        target=target,
        drafter=drafter,
        revision=revision,
        drafter_revision=drafter_revision,
        token=token,
        offline=offline,
        dtype=dtype.value if dtype else None,
        mesh=mesh,
        distributed=distributed,
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
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias={token: bias for token, bias in biases.items() if bias > -math.inf},
        ban_tokens=(*(token for token in biases if biases[token] == -math.inf), *(ban_token or ())),
        seed=seed,
        num_samples=num_samples,
        num_draft_tokens=num_draft_tokens,
        tree=(tree_topk, tree_depth) if tree_topk and tree_depth else None,
        draft_sampling=draft_sampling,
        verification=verification.value,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        batch_size=batch_size,
        cache_length=cache_length,
        compilation_cache=compilation_cache,
        json_path=json_path,
    )
    with _explained(console, *generation.USER_ERRORS):
        refused = generation.run(given, options, console)
    if refused:
        raise typer.Exit(1)


def _check_ranges(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and (wrong := refusal(name, value)):
            raise UsageError(f"--{name.replace('_', '-')} {wrong}")


def _parse_logit_bias(given: Sequence[str]) -> dict[int, float]:
    """Read biases, each "17=-2.5" or a JSON object of some."""
    biases: dict[int, float] = {}
    for text in given:
        try:
            pairs = json.loads(text).items() if text.startswith("{") else [text.split("=")]
            pairs = [(int(token), float(bias)) for token, bias in pairs]
        except (ValueError, TypeError):
            raise UsageError(
                f'--logit-bias {text}: expected ID=VALUE, such as 17=-2.5, or JSON, such as {{"17": -2.5}}'
            ) from None
        for token, bias in pairs:
            if wrong := refusal("bias", bias):
                raise UsageError(f"--logit-bias {text}: the bias of {token} {wrong}")
            if token in biases:
                raise UsageError(f"--logit-bias names token {token} twice; leave one out")
            biases[token] = bias
    return biases


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
