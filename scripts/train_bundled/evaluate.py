"""Judge the pair on the held-out modules: bits per byte, repetition, acceptance lengths."""

from __future__ import annotations

import functools
import json
import lzma
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from jaxspec.shapes import Params
from jaxspec.weights.model_def import ModelDef
from scripts.train_bundled import drafter, recipe
from scripts.train_bundled.target import cross_entropy, generate

WINDOW, STRIDE = (
    1024,
    512,
)  # teacher forcing: a token sees at least STRIDE earlier ones, if there are


def bits_per_byte(
    model_def: ModelDef, params: Params, tokenizer: Tokenizer, texts: list[str]
) -> dict[str, float]:
    """Return the target's bits per byte over whole files, and xz's on the same text."""
    windows, counted = [], []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        for begin in range(0, len(ids), STRIDE):
            first = max(begin + STRIDE - WINDOW, 0)
            row = [recipe.BOS, *ids[first : begin + STRIDE]]
            new = len(ids[begin : begin + STRIDE])
            windows.append(row + [recipe.PAD] * (WINDOW + 1 - len(row)))
            counted.append((len(row) - 1 - new, len(row) - 1))
    nats = 0.0
    for i in range(0, len(windows), 8):
        loss = np.asarray(_losses(model_def, params, jnp.asarray(windows[i : i + 8], jnp.int32)))
        nats += sum(loss[j, a:b].sum() for j, (a, b) in enumerate(counted[i : i + 8]))
    data = [text.encode() for text in texts]
    size = sum(map(len, data))
    return {
        "target": float(nats) / np.log(2) / size,
        "xz": 8 * _xz(b"".join(data)) / size,
        "xz_per_file": 8 * sum(map(_xz, data)) / size,
    }


def _xz(data: bytes) -> int:
    return len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))


@functools.partial(jax.jit, static_argnums=0)
def _losses(model_def: ModelDef, params: Params, rows: jax.Array) -> jax.Array:
    b, t = rows.shape[0], rows.shape[1] - 1
    start, count = jnp.zeros(b, jnp.int32), jnp.full(b, t, jnp.int32)
    out = model_def.bind(params)(rows[:, :-1], start, count, None)
    return cross_entropy(out.logits, rows[:, 1:])


def distinct_share(rows: list[list[int]], n: int = 4) -> tuple[float, float]:
    """Return the share of distinct n-grams: mean over rows, and pooled."""
    grams = [[tuple(row[i : i + n]) for i in range(len(row) - n + 1)] for row in rows]
    pooled = [gram for row in grams for gram in row]
    return float(np.mean([len(set(g)) / len(g) for g in grams])), len(set(pooled)) / len(pooled)


def evaluate(
    models: dict[str, tuple[ModelDef, Params]],
    tokenizer: Tokenizer,
    texts: list[str],
    *,
    num_tokens: int = 128,
) -> dict[str, Any]:
    """Measure everything the target and its drafters promise.

    Args:
      models: "target", "dflash" and "mtp".
      texts: the held-out files.
    """
    prompts = [p["ids"] for p in json.loads(recipe.HELD_OUT.read_text())["prompts"]]
    longest = recipe.DFLASH.block_size
    model_def, params = models["target"]
    result: dict[str, Any] = {}
    for name, temperature in (("greedy", 0.0), ("temperature_1", 1.0)):
        b, width = len(prompts), len(prompts[0])
        text = generate(
            model_def,
            params,
            jnp.asarray(prompts, jnp.int32),
            jnp.full(b, width, jnp.int32),
            jnp.full(b, temperature, jnp.float32),
            jax.random.key(0),
            num_tokens=num_tokens + longest,
        )
        new = np.asarray(text)[:, width : width + num_tokens].tolist()
        per_row, pooled = distinct_share(new)
        result[name] = {
            **{
                kind: _acceptance(models, kind, text, width, num_tokens)
                for kind in ("dflash", "mtp")
            },
            "distinct_4_grams": per_row,
            "distinct_4_grams_pooled": pooled,
            "rows_with_eos": sum(recipe.EOS in row for row in new),
            "samples": [tokenizer.decode(row) for row in new],
        }
    result["bits_per_byte"] = bits_per_byte(model_def, params, tokenizer, texts)
    return result


def _acceptance(
    models: dict[str, tuple[ModelDef, Params]],
    kind: str,
    text: jax.Array,
    prompt_length: int,
    num_tokens: int,
) -> dict[str, Any]:
    """Return how a drafter does on a text that the target wrote."""
    (target, target_params), (model_def, params) = models["target"], models[kind]
    draft = functools.partial(drafter.drafts, (target, model_def), target_params, params)
    rows = drafter.acceptance_lengths(draft, text, prompt_length, num_tokens)
    steps = [length for row in rows for length in row]
    most = max(steps)
    return {
        "tau": float(np.mean(steps)),
        "verify_steps": len(steps),
        "accepted_per_position": [
            round(float(np.mean([s > k for s in steps])), 3) for k in range(1, most)
        ],
    }
