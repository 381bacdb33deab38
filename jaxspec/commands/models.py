"""The options of models and devices, which commands share. Needs no JAX."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from typing import Literal

from jaxspec.commands.options import UsageError, as_flag
from jaxspec.options import Drafting, option

Dtype = Literal["float32", "bfloat16"]
# The values of `jaxspec.quantised.names(on_load=True)`, which needs JAX.
Quantized = Literal[
    "int8",
    "fp8",
    "fp8-dynamic",
    "int4",
    "int4-g16",
    "int4-g64",
    "int4-g128",
    "int4-zeros",
    "int4-g16-zeros",
    "int4-g64-zeros",
    "int4-g128-zeros",
    "nvfp4",
    "mxfp4",
]
KVDtype = Literal["bfloat16", "float32", "fp8"]

FORMATS = typing.get_args(Quantized)
QUANTIZE = f"Formats: {', '.join(FORMATS)}."
DTYPES = {
    "auto": "leave it out",
    "bf16": "write bfloat16",
    **dict.fromkeys(("float16", "fp16", "half"), "bfloat16 takes as little memory"),
    **dict.fromkeys(("fp32", "float", "float64"), "float32 is the most precise"),
}
"""What to give instead of dtypes that other programs take."""
INSTEAD = DTYPES | {f: f"for weights in {f} leave it out, and add --quantize {f}" for f in FORMATS}
KV_INSTEAD = DTYPES | dict.fromkeys(
    ("int8", "fp8_e4m3", "fp8_e5m2", "q8_0"), "fp8 takes half of bfloat16's memory"
)

DRY_RUN = (
    "Read no weights and run nothing: print the memory that this needs, and how many requests fit here "
    "and on cards of other sizes."
)


@dataclass(frozen=True)
class ModelOptions:
    """A target and its drafter: their sources, formats, devices and compiled programs."""

    target: str | None = option(
        None,
        "A target: a directory or a hub id. Default: the bundled one.",
        metavar="PATH|ID",
    )
    drafter: str | None = option(
        None,
        "A drafter: a directory or a hub id; [bold]dflash[/] or [bold]mtp[/], the bundled one of "
        "that kind; [bold]ngram[/], to look drafts up in the row's own text, for any target; "
        "[bold]none[/], to decode plainly. Default: dflash with the bundled target, "
        "else none.",
        metavar="PATH|ID|dflash|mtp|ngram|none",
    )
    revision: str | None = option(None, "Branch, tag or commit of the target's hub id.")
    drafter_revision: str | None = option(None, "Branch, tag or commit of the drafter's hub id.")
    token: str | None = option(
        None, "For the hub. Default: the one huggingface_hub knows.", secret=True
    )
    offline: bool = option(False, "Use what is in the hub cache, and no network.")
    dtype: Dtype | None = option(
        None,
        "Of weights and caches. Default: bfloat16 on GPU, float32 on CPU.",
        instead=INSTEAD,
    )
    kv_dtype: KVDtype | None = option(
        None,
        "Of the target's keys and values in caches. fp8 halves what bfloat16 takes, and rounds. "
        "Default: as --dtype.",
        instead=KV_INSTEAD,
    )
    quantize: Quantized | None = option(
        None,
        f"Quantise the target's linears and experts while they are loaded. {QUANTIZE}",
        metavar="FORMAT",
    )
    quantize_head: Quantized | None = option(
        None,
        "Also its embedding and head, which are one table in Gemma 4 and small Qwen3 models.",
        metavar="FORMAT",
    )
    quantize_vision: Quantized | None = option(
        None,
        "Also the linears of its vision part, which embeds images in prompts.",
        metavar="FORMAT",
    )
    quantize_drafter: Quantized | None = option(
        None,
        "Also the drafter, its own head included. This changes acceptance, never the output.",
        metavar="FORMAT",
    )
    quantize_draft_head: Quantized | None = option(
        None,
        "Draft with a copy of the target's head in this format. This changes acceptance, never the "
        "output. For DFlash drafters, which borrow the head.",
        metavar="FORMAT",
    )
    text_only: bool = option(
        False,
        "Leave out the target's vision part, if it has one: less memory, and no images in prompts.",
    )
    mesh: str | None = option(
        None,
        "Split rows over so many devices, and models over so many. Default: one device.",
        metavar="data=2,model=4",
    )
    distributed: bool = option(
        False,
        "With --mesh: this is one of several processes, each started with this same command by "
        "Slurm, Open MPI or Kubernetes; the mesh is over the devices of all, and the first one "
        "writes, or serves.",
    )

    compilation_cache: str | None = option(
        None,
        "Where compiled programs are kept from run to run. Default: the user's cache directory.",
        metavar="DIR|off",
    )

    def __post_init__(self) -> None:
        """Refuse processes without a mesh, with UsageError."""
        if self.distributed and not self.mesh:
            raise UsageError("--distributed needs --mesh: how to split over the devices of all")

    @property
    def is_plain(self) -> bool:
        """True without a drafter: none was wanted, or a target was named without one."""
        return self.drafter == "none" or (self.target is not None and not self.drafter)

    @property
    def quantized(self) -> str:
        """The formats of quantised parts, as in ", weights int8"; "" if there are none."""
        formats: dict[str, str | None] = {
            "weights": self.quantize,
            "head": self.quantize_head,
            "vision part": self.quantize_vision,
            "drafter": self.quantize_drafter,
            "draft head": self.quantize_draft_head,
        }
        if self.kv_dtype != self.dtype:
            formats["K/V"] = self.kv_dtype
        return "".join(f", {part} {format}" for part, format in formats.items() if format)

    @property
    def rounds(self) -> bool:
        """True if the target's weights, or its keys and values, are rounded on loading."""
        return any((self.quantize, self.quantize_head, self.kv_dtype))

    @property
    def unrounded(self) -> ModelOptions:
        """The same models with an unquantised target."""
        return dataclasses.replace(self, quantize=None, quantize_head=None, kv_dtype=None)

    def check_drafter(self, drafting: Drafting) -> None:
        """Refuse options of drafting without a drafter, with UsageError."""
        wanting = [shown for _, shown in drafting.changes_acceptance]
        if drafting.num_draft_tokens is not None:
            wanting.insert(0, ("num_draft_tokens",))
        if wanting and self.is_plain:
            raise UsageError(f"{as_flag(*wanting[0])} needs a drafter; give one with --drafter")
