"""The options of `jaxspec train-drafter`, beside those of `jaxspec.training.options`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxspec.commands.options import UsageError
from jaxspec.options import RANGES, at_least, option
from jaxspec.training.options import TERMS, loss_terms

Kind = Literal["dflash", "dflash2", "dspark", "mtp"]
Container = Literal["z-lab", "speculators"]
_MEANINGS = "; ".join(
    f"{name}: {meaning}{f' ({kinds[0]})' if kinds else ''}"
    for name, (_, meaning, kinds) in TERMS.items()
)


@dataclass(frozen=True)
class DrafterOptions:
    """The drafter, where it starts from, and the texts."""

    kind: Kind | None = option(
        None, "The method. Default: that of --from; one of the two is needed."
    )
    data: tuple[Path, ...] = option(
        (),
        "Texts, a JSON object a line, as jaxspec generate --json writes them. Several files: "
        "several times.",
        metavar="FILE.jsonl",
    )
    out: Path | None = option(
        None,
        "A directory for the run. A run that was ended goes on there, with the same options.",
        metavar="DIR",
    )
    start: str | None = option(
        None,
        "A drafter to start from: a directory, a hub id, or the bundled dflash or mtp. dflash2 and "
        "dspark can start from dflash. Default: random weights.",
        metavar="PATH|ID",
        flag="--from",
    )
    layers: int | None = option(
        None, "Of a new drafter. Default: up to 5; of an assistant 4.", range=at_least(1)
    )
    hidden_size: int | None = option(
        None,
        "Of a new assistant. Default: a quarter of the target's, and at least 128.",
        range=at_least(1),
    )
    intermediate_size: int | None = option(
        None, "Of the MLPs of a new drafter. Default: twice its hidden size.", range=at_least(1)
    )
    num_heads: int | None = option(
        None,
        "Of queries, of a new drafter. Default: as many as fill its width; of an assistant the target's.",
        range=at_least(1),
    )
    block_size: int | None = option(
        None, "Of a new block drafter, its anchor included. Default: 8.", range=at_least(2)
    )
    mask_token_id: int | None = option(
        None, "Of a new block drafter. Default: that of released ones.", range=at_least(0)
    )
    container: Container | None = option(
        None,
        "The layout of a new block drafter's files, and the conventions that come with it. Default: z-lab.",
    )
    loss: str | None = option(
        None,
        "Weights of the loss's terms, such as kl=0.5,ce=0.5,decay=7. What is not named stays as is usual "
        f"for the kind. {_MEANINGS}.",
        metavar="TERM=WEIGHT,...",
    )

    def __post_init__(self) -> None:
        """Refuse a loss that cannot be read, with FieldError."""
        if self.loss is not None:
            loss_terms(self.loss, self.kind)


@dataclass(frozen=True)
class RegenerateOptions:
    """Answers by the target, in place of those of the files."""

    regenerate: bool = option(
        False, "Let the target answer the prompts of --data first. They are kept in the run."
    )
    answer_tokens: int = option(256, "The most tokens of an answer.", range=at_least(2))
    temperature: float = option(
        0.0, "Of answers. 0 takes the likeliest token.", range=RANGES["temperature"]
    )
    thinking: bool = option(False, "Let the chat template turn thinking on.")
    batch_size: int = option(8, "Prompts answered together.", range=at_least(1))

    def __post_init__(self) -> None:
        """Refuse thinking without answers to write, with UsageError."""
        if self.thinking and not self.regenerate:
            raise UsageError("--thinking is of answers that the target writes: add --regenerate")
