"""The effects of quantising a target: the same text under the target as it is, and quantised.

Read `compare_formats`. The two targets read the text one after the other, so the device never holds
both. Passes without caches round keys and values as caches do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.filesize import decimal
from rich.table import Table

from jaxspec.commands.check.options import CheckOptions
from jaxspec.commands.check.text import decode_greedily, prompts_for
from jaxspec.commands.models import ModelOptions
from jaxspec.commands.options import UsageError
from jaxspec.commands.progress import Notify
from jaxspec.commands.startup import load_models
from jaxspec.options import Drafting
from jaxspec.runtime.programs import jit
from jaxspec.shapes import Array, Float, Int, Params
from jaxspec.tokenizer import Tokenizer, TokenizerError
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.model_def import ModelDef


@dataclass(frozen=True)
class FormatComparison:
    """The effects of quantising the target: pairs of unquantised and quantised.

    Attributes:
      weights: the storage of the weights, and of K/V if in another dtype.
      nbytes: of the weights.
      bits_per_byte: of the text under each; of a token, where there is no tokenizer.
      top1_agreement: share of tokens after which both have the same most likely token.
      kl: mean of KL(unquantised || quantised) over these tokens, in nats.
      acceptance_length: tokens per verify step, with the same drafter.
    """

    weights: tuple[str, ...]
    nbytes: tuple[int, ...]
    tokens: int
    bits_per_byte: tuple[float, ...]
    top1_agreement: float
    kl: float
    acceptance_length: tuple[float, ...]

    def render(self) -> Table:
        """Return the comparison as a table."""
        table = Table(
            title=f"quantising, on {self.tokens:,} tokens of the text",
            caption=f"The likeliest token is the same after {self.top1_agreement:.2%} of the tokens. "
            f"KL is {self.kl:.5f} nats a token.",
            title_justify="left",
            caption_justify="left",
            box=box.SIMPLE_HEAD,
        )
        for name in ("weights", "size", "bits a byte", "acceptance length"):
            table.add_column(name)
        for i, weights in enumerate(self.weights):
            bits, length = self.bits_per_byte[i], self.acceptance_length[i]
            table.add_row(weights, decimal(self.nbytes[i]), f"{bits:.4f}", f"{length:.3f}")
        return table


def compare_formats(
    models: ModelOptions,
    checking: CheckOptions,
    drafting: Drafting,
    notify: Notify,
) -> FormatComparison:
    """Load the target unquantised and then quantised, and compare.

    Raises:
      UsageError: a prompt cannot be decoded.
    """
    storages, nbytes, lengths, read = [], [], [], []
    prompts: Sequence[tuple[int, ...]] = ()
    num_bytes = 0
    for options, kind in ((models.unrounded, "unquantised"), (models, "quantised")):
        notify(f"the {kind} target reads the text")
        target, drafter = load_models(options)
        assert drafter is not None
        if not prompts:
            prompts = prompts_for(target, checking).ids
            num_bytes = _bytes_of(target, prompts)
        size = min(checking.batch_size, len(prompts))
        sizes: dict[str, Any] = dict(batch_size=size, drafting=drafting)
        done = decode_greedily(target, drafter, prompts, checking.new_tokens, **sizes)
        lengths.append(float(np.mean([n for c in done for n in c.acceptance_lengths])))
        storages.append(target.model_def.dtypes)
        nbytes.append(sum(x.nbytes for x in target.params.values()))
        read.append(_read(target, prompts))
        del target, drafter  # the device may hold one target, and not two
    chosen = [np.asarray(ids[1:])[:, None] for ids in prompts]
    pairs = list(zip(*read, strict=True))
    same = np.concatenate([p.argmax(-1) == q.argmax(-1) for p, q in pairs])
    kl = np.concatenate([(np.exp(p) * (p - q)).sum(-1) for p, q in pairs])
    bits = [
        -sum(
            float(np.take_along_axis(p, c, axis=-1).sum()) for p, c in zip(of, chosen, strict=True)
        )
        / math.log(2)
        / num_bytes
        for of in read
    ]
    return FormatComparison(
        tuple(storages),
        tuple(nbytes),
        len(same),
        tuple(bits),
        float(same.mean()),
        float(kl.mean()),
        tuple(lengths),
    )


def _bytes_of(target: LoadedModel, prompts: Sequence[tuple[int, ...]]) -> int:
    """Return the bytes of all prompts after their first tokens; tokens, without a tokenizer."""
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
    rows = []
    for ids in prompts:
        padded = np.zeros((1, longest), np.int32)
        padded[0, : len(ids)] = ids
        count = jnp.full(1, len(ids), jnp.int32)
        out = program(target.model_def, target.params, jnp.asarray(padded), count)
        rows.append(np.asarray(out)[0, : len(ids) - 1])
    return rows


def _log_probs(
    model_def: ModelDef, params: Params, tokens: Int[Array, "1 T"], count: Int[Array, " 1"]
) -> Float[Array, "1 T V"]:
    start = jnp.zeros(1, jnp.int32)
    return jax.nn.log_softmax(model_def.bind(params)(tokens, start, count, None).logits, axis=-1)
