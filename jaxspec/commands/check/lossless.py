"""Decoding against its reference: speculative with plain, quantised with unquantised.

`first_differences` and `Difference` are about the first: output is lossless against the target as
it is loaded. For the second read `compare_formats`. The two targets read the text one after the
other, so the device never holds both. Passes without caches round keys and values as caches do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.filesize import decimal
from rich.table import Table

from jaxspec.commands.check.text import decode_greedily, prompts_for
from jaxspec.commands.models import ModelOptions
from jaxspec.commands.options import UsageError
from jaxspec.commands.startup import load_models
from jaxspec.engine.request import Completion
from jaxspec.options import Drafting
from jaxspec.runtime.programs import jit
from jaxspec.shapes import Array, Float, Int, Params
from jaxspec.tokenizer import Tokenizer, TokenizerError
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.model_def import ModelDef

NEAR_TIE_GAP = 1e-4  # float32: closer logits may swap when a pass has another shape
NEAR_TIE_ULPS = 4  # bfloat16: likewise, in units of the last place of the larger logit


@dataclass(frozen=True)
class Difference:
    """The first token of a row in which speculative decoding differs from plain decoding.

    Attributes:
      position: of the token in its row.
      gap: between the target's logits of the two tokens, when it reads the row again.
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
    ) -> Difference:
        plain, speculative = (float(logits[token]) for token in tokens)
        gap = abs(plain - speculative)
        largest = max(abs(plain), abs(speculative), float(jnp.finfo(jnp.bfloat16).tiny))
        ulps = gap / 2.0 ** (math.floor(math.log2(largest)) - jnp.finfo(jnp.bfloat16).nmant)
        near = gap < NEAR_TIE_GAP if dtype == "float32" else ulps <= NEAR_TIE_ULPS
        return cls(row, position, *tokens, plain, speculative, gap, ulps, near)


def first_differences(
    plain: Sequence[Completion], speculative: Sequence[Completion]
) -> dict[int, int]:
    """Return, for each row that differs, the number of tokens that agree before it does."""
    differences = {}
    for row, (one, other) in enumerate(zip(plain, speculative, strict=True)):
        if one.token_ids != other.token_ids:
            pairs = zip(one.token_ids, other.token_ids, strict=False)
            differences[row] = next(i for i, (a, b) in enumerate(pairs) if a != b)
    return differences


# --- formats -------------------------------------------------------------------------------------


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
    text: Path | None,
    rows: int,
    new_tokens: int,
    batch_size: int,
    drafting: Drafting,
    notify: Callable[[str], None],
) -> FormatComparison:
    """Load the target unquantised and then quantised, and compare.

    Args:
      models: the formats of the target among their options.
      text, rows, new_tokens, batch_size: as in `CheckOptions`.
      notify: called with the current activity.

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
            prompts = prompts_for(target, text, rows).ids
            num_bytes = _bytes_of(target, prompts)
        size = min(batch_size, len(prompts))
        done = decode_greedily(
            target, drafter, prompts, new_tokens, batch_size=size, drafting=drafting
        )
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
