"""The options of `jaxspec eval`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxspec.commands.output import OutputOptions
from jaxspec.options import RANGES, SEEDS, at_least, option


@dataclass(frozen=True)
class EvalOptions:
    """The prompts of an evaluation, and how they are decoded."""

    data: Path | None = option(
        None,
        "The task's file, as its makers publish it: JSON lines, or parquet. Default: a package that has "
        "it, else the hub.",
        metavar="FILE.jsonl",
    )
    protocol: Literal["deepspec", "z-lab"] = option(
        "deepspec",
        "Whose temperature and length to take where none are given: deepspec's temperature 1, or "
        "z-lab's 0; 2048 tokens.",
    )
    limit: int | None = option(
        None, "Prompts, from the first one on. Default: all.", range=at_least(1)
    )
    temperature: float | None = option(
        None, "0 takes the likeliest token. Default: the protocol's.", range=RANGES["temperature"]
    )
    max_new_tokens: int | None = option(
        None, "For each prompt. Default: the protocol's.", range=at_least(2)
    )
    thinking: bool = option(False, "Let the chat template turn thinking on.")
    raw: bool = option(False, "Prompts as they are, without the chat template.")
    batch_size: int = option(1, "Prompts decoded together.", range=at_least(1))
    seed: int = option(0, "Of random draws.", range=SEEDS)
    skip_plain: bool = option(False, "Do not decode the prompts without drafts, too.")
    score: bool = option(
        False,
        "Also count the right replies: GSM8K's numbers, and HumanEval's tests, which run the code that "
        "the model wrote on this machine.",
    )


@dataclass(frozen=True)
class EvalOutput(OutputOptions):
    """The files of an evaluation."""

    rows_path: str | None = option(
        None,
        "Keep each response in this file, as a line of JSON. The same command goes on from there "
        "after an interruption.",
        metavar="FILE.jsonl",
        flag="--rows",
    )
    overwrite: bool = option(False, "With --rows: begin anew, and lose what the file holds.")
    plot_path: Path | None = option(
        None,
        "Also draw acceptance by draft and by length of context. Needs matplotlib: the extra "
        "\\[plot].",
        metavar="FILE.png",
        flag="--plot",
    )
