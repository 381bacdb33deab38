"""The options of `jaxspec generate`, and the refusal of impossible combinations. Needs no JAX."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxspec.commands.models import DRY_RUN, ModelOptions
from jaxspec.commands.options import PartialRecord, UsageError, as_flag, read_text
from jaxspec.commands.output import refuse_inputs
from jaxspec.configs.gemma4_vision import BUDGETS
from jaxspec.options import (
    CHOOSE_LENGTH_HELP,
    SEEDS,
    ChooseLength,
    Drafting,
    Range,
    Sampling,
    at_least,
    check_ranges,
    option,
)

if TYPE_CHECKING:
    from jaxspec.text.grammars import Kind


@dataclass(frozen=True)
class TextOptions:
    """Prompts, and the output of their text."""

    prompts_file: Path | None = option(
        None,
        'Lines of {"prompt": text or ids} or, with --chat, {"messages": \\[...]}. A line may have '
        "an id, and sampling values, seed, max_new_tokens and stop of its own. With - they are read "
        "from standard input.",
        metavar="FILE.jsonl|-",
        flag="--prompts",
    )
    prompt_ids: tuple[str, ...] = option(
        (), "A prompt as token ids; needs no tokenizer. Repeatable.", metavar="5,6,7"
    )
    chat: bool = option(False, "Apply the checkpoint's chat template; a prompt is the user's turn.")
    chat_template_kwargs: Mapping[str, Any] | None = option(
        None, 'Values for the template, such as {"enable_thinking": true}.', metavar="JSON"
    )
    images: tuple[Path, ...] = option(
        (),
        "With --chat: an image before the text of each prompt. Repeatable.",
        metavar="FILE",
        flag="--image",
    )
    image_tokens: int | None = option(
        None,
        "The most tokens of each image. Default: the checkpoint's own number, 280 in released ones.",
        range=BUDGETS,
        metavar="70|140|280|560|1120",
    )
    image_root: Path | None = option(
        None,
        "Where paths of images in --prompts begin, and which they may not leave. Default: the "
        "directory of that file.",
        metavar="DIR",
    )
    stop: tuple[str, ...] = option((), "End before this text. Repeatable.", metavar="TEXT")
    json_path: str | None = option(
        None,
        "Write one line of JSON a prompt and a summary line, and nothing else to stdout. A file "
        "gets each line when it is done, and the same command goes on with what is missing. "
        "Log-probabilities are written here alone.",
        metavar="PATH|-",
        flag="--json",
    )
    overwrite: bool = option(False, "With --json PATH: start anew, whatever the file holds.")

    def __post_init__(self) -> None:
        """Refuse impossible options, with UsageError."""
        if "" in self.stop:
            raise UsageError("--stop: expected some text, got none")
        if self.chat_template_kwargs is not None and not self.chat:
            raise UsageError("--chat-template-kwargs needs --chat")
        if self.images and not self.chat:
            raise UsageError("--image needs --chat: the chat template has the places of images")
        if self.overwrite and self.json_path in (None, "-"):
            raise UsageError("--overwrite needs --json PATH: the file to start anew")
        check_ranges(self)
        refuse_inputs(self.json_path, ("--prompts", self.prompts_file), ("standard input", 0))

    @property
    def image_directory(self) -> Path:
        """The directory that paths of images in lines of a file may not leave."""
        if self.image_root is not None:
            return self.image_root
        is_file = self.prompts_file is not None and str(self.prompts_file) != "-"
        return self.prompts_file.parent if self.prompts_file and is_file else Path()


@dataclass(frozen=True)
class DecodingOptions:
    """Options of decoding beyond `Sampling` and `Drafting`."""

    max_new_tokens: int = option(128, "For each prompt.", range=at_least(1))
    ban_tokens: tuple[int, ...] = option(
        (), "Never generate this token. Repeatable.", metavar="ID", flag="--ban-token"
    )
    sampling: Literal["model"] | None = option(
        None,
        "Where not given here, temperature, top-k, top-p, min-p and repetition penalty are those "
        "of the checkpoint (model).",
    )
    seed: int = option(
        0, "Each completion's own is made of this and its place in the list.", range=SEEDS
    )
    num_samples: int = option(
        1,
        "Completions of each prompt; each reads the prompt for itself, unless --prefix-gib is "
        "given.",
        range=at_least(1),
    )
    stop_ids: tuple[int, ...] = option(
        (),
        "End with this token, as with the checkpoint's own end-of-sequence ids. Repeatable.",
        metavar="N",
        flag="--stop-id",
    )
    ignore_eos: bool = option(False, "Do not end with the checkpoint's own end-of-sequence ids.")
    json_schema: Path | None = option(
        None, "Write JSON that this schema describes; {} is any JSON.", metavar="FILE"
    )
    regex: str | None = option(
        None, "Write a match of this regular expression, in the syntax of Rust's regex crate."
    )
    lark: Path | None = option(None, "Write what this Lark grammar describes.", metavar="FILE")

    @property
    def grammar(self) -> tuple[Kind, str] | None:
        """The kind and source of the grammar; None without one.

        Raises:
          UsageError: there are several, or a file cannot be read.
        """
        kinds: tuple[Kind, ...] = ("json_schema", "regex", "lark")
        sources: dict[Kind, Path | str] = {
            kind: getattr(self, kind) for kind in kinds if getattr(self, kind) is not None
        }
        if len(sources) > 1:
            raise UsageError(f"{' and '.join(map(as_flag, sources))}: give one of them")
        for kind, source in sources.items():
            is_file = isinstance(source, Path)
            return kind, read_text(as_flag(kind), source) if is_file else source
        return None


@dataclass(frozen=True)
class RunningOptions:
    """Shapes, and what is kept of prompts."""

    batch_size: int | None = option(
        None,
        "Prompts decoded together. Default: all, up to 8.",
        range=at_least(1),
    )
    cache_length: int | None = option(
        None,
        "Positions each cache row holds. Default: what the longest prompt needs, rounded up.",
        range=at_least(1),
    )
    invariant: bool = option(
        False,
        "No prompt's text depends on its neighbours, to the last bit: on a GPU, prompts then share "
        "small passes only.",
    )
    choose_length: ChooseLength = option("exact", CHOOSE_LENGTH_HELP)
    prefix_gib: float = option(
        0.0,
        "GiB of each device for beginnings of prompts: samples of one prompt, and prompts that "
        "begin alike, are then read once.",
        range=Range("0 or more; 0: none", lambda x: (x >= 0) & (x < math.inf)),
    )
    dry_run: bool = option(False, DRY_RUN)


@dataclass(frozen=True)
class GenerateOptions:
    """All options; None leaves a choice to the run."""

    text: TextOptions = TextOptions()
    models: ModelOptions = ModelOptions()
    sampling: PartialRecord[Sampling] = PartialRecord(Sampling, {})
    drafting: Drafting = Drafting()
    decoding: DecodingOptions = DecodingOptions()
    running: RunningOptions = RunningOptions()

    def __post_init__(self) -> None:
        """Refuse options that exclude each other, with UsageError."""
        self.models.check_drafter(self.drafting)
        if self.text.json_path is None:
            for name in ("logprobs", "top_logprobs"):
                if self.sampling.values.get(name):
                    flag = "--" + name.replace("_", "-")
                    raise UsageError(f"{flag} needs --json, which they are written with")

    @property
    def banned(self) -> tuple[int, ...]:
        """The banned tokens: those with a bias of -inf, then those of --ban-token."""
        biases = self.sampling.values.get("logit_bias", {})
        return (*(t for t in biases if biases[t] == -math.inf), *self.decoding.ban_tokens)

    @property
    def biases(self) -> dict[int, float]:
        """The biases of tokens, without those that ban."""
        biases = self.sampling.values.get("logit_bias", {})
        return {token: bias for token, bias in biases.items() if bias > -math.inf}
