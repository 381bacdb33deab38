"""What quantising changes, of weights or of keys and values: the target beside the unquantised one.

`check` itself is about the quantised pair: output is lossless against the quantised target. Read
`compared`. Both targets read the text of the check, one after the other, so that the device never
holds both. Passes without caches round keys and values as caches do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.filesize import decimal

from jaxspec.commands.check.run import decode_greedily
from jaxspec.commands.check.text import prompts_for
from jaxspec.commands.models import ModelOptions
from jaxspec.commands.options import UsageError
from jaxspec.commands.startup import load_models
from jaxspec.options import Drafting
from jaxspec.runtime.programs import jit
from jaxspec.shapes import Array, Float, Int, Params
from jaxspec.tokenizer import Tokenizer, TokenizerError
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.model_def import ModelDef


@dataclass(frozen=True)
class FormatsCompared:
    """What quantising the target changes. Pairs are of the unquantised and of the quantised target.

    Attributes:
      weights: how each stores its weights, and K/V if in another dtype.
      nbytes: the size of the weights.
      bits_per_byte: of the text under each; of a token, where there is no tokenizer.
      top1_agreement: the share of tokens after which both find the same token likeliest.
      kl: mean of KL(unquantised || quantised) over these tokens, in nats.
      acceptance_length: tokens a verify step, drafts of the same drafter.
    """

    weights: tuple[str, str]
    nbytes: tuple[int, int]
    tokens: int
    bits_per_byte: tuple[float, float]
    top1_agreement: float
    kl: float
    acceptance_length: tuple[float, float]

    def shown(self) -> str:
        """Return what to print."""
        lines = [
            f"Quantising, on {self.tokens:,} tokens of the text:",
            f"  weights              {self.weights[0]}: {decimal(self.nbytes[0])}; "
            f"{self.weights[1]}: {decimal(self.nbytes[1])}",
            f"  bits a byte          {self.bits_per_byte[0]:.4f}, then {self.bits_per_byte[1]:.4f}",
            f"  same likeliest token {self.top1_agreement:.2%}; KL {self.kl:.5f} nats a token",
            f"  acceptance length    {self.acceptance_length[0]:.3f}, "
            f"then {self.acceptance_length[1]:.3f}",
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class _Seen:
    """What one target makes of the text."""

    storage: str
    nbytes: int
    log_probs: list[np.ndarray]  # of each row, [tokens - 1, V]
    acceptance_length: float


def compared(
    models: ModelOptions,
    text: Path | None,
    rows: int,
    new_tokens: int,
    batch_size: int,
    drafting: Drafting,
    say: Callable[[str], None],
) -> FormatsCompared:
    """Load the target twice, not quantised and quantised, and compare.

    Args:
      models: they say how the target is to be quantised.
      text, rows, new_tokens, batch_size: as in `CheckOptions`.
      say: called with what is being done.

    Raises:
      UsageError: a prompt cannot be decoded.
    """
    seen: list[_Seen] = []
    prompts: Sequence[tuple[int, ...]] = ()
    num_bytes = 0
    for options, kind in ((models.unrounded, "unquantised"), (models, "quantised")):
        say(f"the {kind} target reads the text")
        target, drafter = load_models(options)
        assert drafter is not None
        if not prompts:
            prompts = prompts_for(target, text, rows).ids
            num_bytes = _bytes_of(target, prompts)
        how: dict[str, Any] = dict(batch_size=min(batch_size, len(prompts)), drafting=drafting)
        done = decode_greedily(target, drafter, prompts, new_tokens, **how)
        lengths = [n for c in done for n in c.acceptance_lengths]
        nbytes = sum(x.nbytes for x in target.params.values())
        read = _read(target, prompts)
        seen.append(_Seen(target.model_def.dtypes, nbytes, read, float(np.mean(lengths))))
        del target, drafter  # one of them fits where both may not
    whole, small = seen
    pairs = list(zip(whole.log_probs, small.log_probs, strict=True))
    same = np.concatenate([p.argmax(-1) == q.argmax(-1) for p, q in pairs])
    kl = np.concatenate([(np.exp(p) * (p - q)).sum(-1) for p, q in pairs])

    def bits(of: _Seen) -> float:
        chosen = [
            np.take_along_axis(p, np.asarray(ids[1:])[:, None], axis=-1).sum()
            for p, ids in zip(of.log_probs, prompts, strict=True)
        ]
        return float(-np.sum(chosen) / np.log(2) / num_bytes)

    return FormatsCompared(
        (whole.storage, small.storage),
        (whole.nbytes, small.nbytes),
        len(same),
        (bits(whole), bits(small)),
        float(same.mean()),
        float(kl.mean()),
        (whole.acceptance_length, small.acceptance_length),
    )


def _bytes_of(target: LoadedModel, prompts: Sequence[tuple[int, ...]]) -> int:
    """Return the bytes of what follows the first token of each prompt; tokens without a tokenizer."""
    try:
        tokenizer = Tokenizer.load(target.directory)
        return sum(len(tokenizer.decode(ids[1:]).encode()) for ids in prompts)
    except TokenizerError:
        return sum(len(ids) - 1 for ids in prompts)


def _read(target: LoadedModel, prompts: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Return the log-probabilities after every token of each prompt but the last, on the host."""
    longest = max(map(len, prompts))
    if longest < 2:
        raise UsageError(
            "the text has rows of one token; check needs longer ones to compare formats"
        )
    program = jit(_log_probs, static_argnums=0)
    found = []
    for ids in prompts:
        padded = np.zeros((1, longest), np.int32)
        padded[0, : len(ids)] = ids
        count = jnp.full(1, len(ids), jnp.int32)
        out = program(target.model_def, target.params, jnp.asarray(padded), count)
        found.append(np.asarray(out)[0, : len(ids) - 1])
    return found


def _log_probs(
    model_def: ModelDef, params: Params, tokens: Int[Array, "1 T"], count: Int[Array, " 1"]
) -> Float[Array, "1 T V"]:
    start = jnp.zeros(1, jnp.int32)
    return jax.nn.log_softmax(model_def.bind(params)(tokens, start, count, None).logits, axis=-1)
