"""Block drafters recomputed in numpy, from the tensors of their files by name and from facts in words of no code.

Float64, loops over heads and queries, no cache, nothing of ours. `hidden_of` is the backbone, `logits_of` the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

Tensors = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Facts:
    """What the config.json of a drafter says, in whichever layout.

    Attributes:
      windows, causal: of each layer. A window counts keys before the anchor if `from_anchor_window`,
        and otherwise keys up to the query.
      shifted: whether the slot of the anchor predicts the first draft.
      embed_scale: multiplies embeddings.
      conv: channels that share a kernel of a convolution; 0 for none.
      taps: of a convolution.
    """

    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    mask: int
    theta: float
    from_anchor_window: bool = True
    shifted: bool = False
    embed_scale: float = 1.0
    softcap: float | None = None
    conv: int = 0
    taps: int = 2


def norm(x: np.ndarray, weight: np.ndarray | float = 1.0) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight


def rotate(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """Turn the complex numbers whose parts stand half a head apart."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-np.arange(half) / half)
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], -1)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def hidden_of(
    f: Facts, w: Tensors, embedding: np.ndarray, features: np.ndarray, anchor: int, drafts: int
) -> np.ndarray:
    """Return the normed hidden states of the slots that predict.

    Args:
      features: of all committed tokens, [N, features].
    """
    n, masks = len(features), drafts - f.shifted
    context = norm(features @ w["fc.weight"].T, w["hidden_norm.weight"])
    x = embedding[[anchor] + [f.mask] * masks] * f.embed_scale
    positions = np.arange(n, n + len(x))
    everything = np.arange(n + len(x))
    for i, (window, causal) in enumerate(zip(f.windows, f.causal, strict=True)):
        t = {
            k.removeprefix(f"layers.{i}."): v for k, v in w.items() if k.startswith(f"layers.{i}.")
        }
        h = norm(x, t["input_layernorm.weight"])
        before, after = convolutions(f, t, "attention_conv", h)
        h = before(h)
        rows = np.concatenate([context, h])
        q, k, v = (t[f"self_attn.{c}_proj.weight"] for c in "qkv")
        outs = []
        for head in range(f.heads):
            kv = head // (f.heads // f.kv_heads)
            of_q = slice(head * f.head_dim, (head + 1) * f.head_dim)
            of_kv = slice(kv * f.head_dim, (kv + 1) * f.head_dim)
            queries = rotate(norm(h @ q[of_q].T, t["self_attn.q_norm.weight"]), positions, f.theta)
            keys = rotate(
                norm(rows @ k[of_kv].T, t["self_attn.k_norm.weight"]), everything, f.theta
            )
            out = np.zeros_like(queries)
            for j, position in enumerate(positions):
                seen = np.ones(len(everything), bool)
                if window is not None and f.from_anchor_window:
                    seen = everything >= n - window
                elif window is not None:
                    seen = everything > position - window
                if causal:
                    seen &= everything <= position
                scores = np.exp(keys[seen] @ queries[j] * f.head_dim**-0.5)
                out[j] = scores / scores.sum() @ (rows @ v[of_kv].T)[seen]
            outs.append(out)
        x = x + after(np.concatenate(outs, -1) @ t["self_attn.o_proj.weight"].T)
        h = norm(x, t["post_attention_layernorm.weight"])
        before, after = convolutions(f, t, "mlp_conv", h)
        h = before(h)
        gated = silu(h @ t["mlp.gate_proj.weight"].T) * (h @ t["mlp.up_proj.weight"].T)
        x = x + after(gated @ t["mlp.down_proj.weight"].T)
    return norm(x, w["norm.weight"])[0 if f.shifted else 1 :]


def convolutions(f: Facts, t: Tensors, name: str, u: np.ndarray):
    """Return the convolutions before and after a part of a layer, whose kernels depend on its input u."""
    if not f.conv:
        return lambda x: x, lambda x: x
    delta = (u @ t[f"{name}.kernel_projection.weight"].T).reshape(len(u), 2, f.taps, -1)
    kernels = t[f"{name}.base_kernel"] + np.repeat(delta, f.conv, axis=-1)

    def convolve(index: int, x: np.ndarray) -> np.ndarray:
        out = np.zeros_like(x)
        for i in range(len(x)):
            for tap in range(min(f.taps, i + 1)):
                out[i] += kernels[i, index, tap] * x[i - tap]
        return out

    return lambda x: convolve(0, x), lambda x: convolve(1, x)


def logits_of(f: Facts, head: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    logits = hidden @ head.T
    return logits if f.softcap is None else f.softcap * np.tanh(logits / f.softcap)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def gemma_hidden_of(
    f: Facts,
    w: Tensors,
    features: np.ndarray,
    anchor: int,
    drafts: int,
    *,
    rotary: float,
    values_are_keys: bool,
) -> np.ndarray:
    """Return the normed hidden states of a drafter with full layers of Gemma 4, sampled from the anchor."""
    n = len(features)
    context = norm(features @ w["fc.weight"].T, w["hidden_norm.weight"])
    x = w["embed_tokens.weight"][[anchor] + [f.mask] * (drafts - 1)] * f.embed_scale
    everything = np.arange(n + len(x))
    half = f.head_dim // 2
    frequencies = f.theta ** (-2 * np.arange(half) / f.head_dim)
    frequencies[int(rotary * half) :] = 0

    def turned(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        z = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * positions[:, None] * frequencies)
        return np.concatenate([z.real, z.imag], -1)

    for i in range(len(f.windows)):
        t = {
            k.removeprefix(f"layers.{i}."): v for k, v in w.items() if k.startswith(f"layers.{i}.")
        }
        h = norm(x, t["input_layernorm.weight"])
        rows, outs = np.concatenate([context, h]), []
        for head in range(f.heads):
            kv = head // (f.heads // f.kv_heads)
            of_q = slice(head * f.head_dim, (head + 1) * f.head_dim)
            of_kv = slice(kv * f.head_dim, (kv + 1) * f.head_dim)
            q = norm(h @ t["self_attn.q_proj.weight"][of_q].T, t["self_attn.q_norm.weight"])
            raw = rows @ t["self_attn.k_proj.weight"][of_kv].T
            v = raw if values_are_keys else rows @ t["self_attn.v_proj.weight"][of_kv].T
            k = turned(norm(raw, t["self_attn.k_norm.weight"]), everything)
            scores = np.exp(turned(q, everything[n:]) @ k.T)  # scale 1, no mask
            outs.append(scores / scores.sum(-1, keepdims=True) @ norm(v))
        out = np.concatenate(outs, -1) @ t["self_attn.o_proj.weight"].T
        x = x + norm(out, t["post_attention_layernorm.weight"])
        h = norm(x, t["pre_feedforward_layernorm.weight"])
        gate = h @ t["mlp.gate_proj.weight"].T
        gelu = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        out = (gelu * (h @ t["mlp.up_proj.weight"].T)) @ t["mlp.down_proj.weight"].T
        x = (x + norm(out, t["post_feedforward_layernorm.weight"])) * t["layer_scalar"]
    return norm(x, w["norm.weight"])
