"""The vision part of Gemma 4: patches of images in, embeddings of the target's width out.

Read `Gemma4Vision`. The tower of E2B, E4B, 26B-A4B and 31B is a transformer in which every patch of
an image sees every other. 12B has a product and norms in its place. In shapes M is the number of
patches, X the numbers of a patch, R the tokens of an image. Source for every detail:
transformers `models/gemma4/modeling_gemma4.py` and `models/gemma4_unified`, which the parity tests
run beside this.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxspec.configs.gemma4_vision import QUERY_BLOCK, Gemma4VisionConfig
from jaxspec.mesh import WHOLE, on_each_device
from jaxspec.models.layers import gelu_tanh, project, rms_norm, rope_frequencies
from jaxspec.models.xla import traced_once
from jaxspec.shapes import Array, Bool, Float, Int
from jaxspec.weights.model_def import param
from pallas_kernels.common.reference_ops import contract, rotate
from pallas_kernels.dispatch import capability


class Gemma4Vision(nnx.Module):
    """The vision part of a Gemma 4 checkpoint."""

    def __init__(self, config: Gemma4VisionConfig, *, dtype: jnp.dtype):
        self.config = config
        self.encoder = (Tower if config.num_layers else PatchEmbedder)(config, dtype=dtype)
        d = config.hidden_size
        self.projection = param(d, config.text_hidden_size, dtype=dtype, fan_in=d)

    def __call__(
        self, patches: Float[Array, "B M X"], positions: Int[Array, "B M 2"]
    ) -> Float[Array, "B R D"]:
        """Return the embeddings of images, as they stand in the target's sequence.

        Args:
          patches: red, green and blue of each pixel of each patch, row by row, from 0 to 1. M is a
            multiple of the patches of a token.
          positions: column and row of each patch in its image; -1 and -1 for padding, which is at
            the end.

        Returns:
          An embedding for each token, in the order of rows. Those of padding mean nothing.
        """
        x = self.encoder(patches, positions)
        return project(rms_norm(x, None, self.config.rms_norm_eps), self.projection[...])


class PatchEmbedder(nnx.Module):
    """The vision part of 12B: norm, product, norm, plus a position for each axis, norm."""

    def __init__(self, config: Gemma4VisionConfig, *, dtype: jnp.dtype):
        d, pixels = config.hidden_size, 3 * config.patch_size**2
        self.patch_norm = LayerNorm(pixels, dtype=dtype)
        self.patch_in = param(pixels, d, dtype=dtype, fan_in=pixels)
        self.patch_bias = param(d, dtype=dtype)
        self.embedding_norm = LayerNorm(d, dtype=dtype)
        self.positions = param(config.num_positions, 2, d, dtype=dtype, fan_in=d)
        self.position_norm = LayerNorm(d, dtype=dtype)

    def __call__(
        self, patches: Float[Array, "B M X"], positions: Int[Array, "B M 2"]
    ) -> Float[Array, "B M D"]:
        weight = self.patch_in[...]
        x = self.patch_norm(patches.astype(weight.dtype))
        x = self.embedding_norm(project(x, weight) + self.patch_bias[...])
        x_at, y_at = jnp.moveaxis(jnp.maximum(positions, 0), -1, 0)
        table = self.positions[...]
        return self.position_norm(x + table[x_at, 0] + table[y_at, 1])


class LayerNorm(nnx.Module):
    """A norm that subtracts the mean, with weight and bias."""

    def __init__(self, width: int, *, dtype: jnp.dtype):
        self.scale = param(width, dtype=dtype)
        self.bias = param(width, dtype=dtype)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        x32 = x.astype(jnp.float32)
        x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        # 1e-5 is the default of the norms of torch, which no config changes.
        x32 = x32 * lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + 1e-5)
        scale, bias = self.scale[...], self.bias[...]
        return (x32 * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


class Tower(nnx.Module):
    """A transformer over patches, whose output is pooled: one token of 3 x 3 patches."""

    def __init__(self, config: Gemma4VisionConfig, *, dtype: jnp.dtype):
        d, pixels = config.hidden_size, 3 * config.patch_size**2
        self.config = config
        self.patch_in = param(pixels, d, dtype=dtype, fan_in=pixels)
        self.positions = param(2, config.num_positions, d, dtype=dtype, fan_in=d)
        self.layers = nnx.List([TowerLayer(config, dtype=dtype) for _ in range(config.num_layers)])
        if config.standardized:
            self.shift = param(d, dtype=dtype)
            self.scale = param(d, dtype=dtype)

    def __call__(
        self, patches: Float[Array, "B M X"], positions: Int[Array, "B M 2"]
    ) -> Float[Array, "B R D"]:
        weight, table = self.patch_in[...], self.positions[...]
        x_at, y_at = jnp.moveaxis(jnp.maximum(positions, 0), -1, 0)
        # From -1 to 1 in float32. Pixels that are rounded to bfloat16 first are visibly others.
        pixels = (2 * patches.astype(jnp.float32) - 1).astype(weight.dtype)
        x = project(pixels, weight) + table[0, x_at] + table[1, y_at]
        real = positions[..., 0] >= 0
        angles = _angles(positions, self.config)
        for layer in self.layers:
            x = _run_layer(layer, x, angles, real)
        pooled = _pool(x, positions, self.config.pool_size)
        out = pooled.astype(jnp.float32) * math.sqrt(self.config.hidden_size)
        if self.config.standardized:
            shift, scale = self.shift[...], self.scale[...]
            out = (out - shift.astype(jnp.float32)) * scale.astype(jnp.float32)
        return out.astype(x.dtype)


class TowerLayer(nnx.Module):
    """Attention and MLP, each between two norms:

    x = x + norm(attention(norm(x)))
    x = x + norm(mlp(norm(x)))
    """

    def __init__(self, config: Gemma4VisionConfig, *, dtype: jnp.dtype):
        d, n, h, f = config.hidden_size, config.num_heads, config.head_dim, config.intermediate_size
        linear = functools.partial(Linear, clipped=config.clipped, dtype=dtype)
        self.pre_attention_norm = param(d, dtype=dtype)
        self.q, self.k, self.v = linear(d, n, h), linear(d, n, h), linear(d, n, h)
        self.q_norm, self.k_norm = param(h, dtype=dtype), param(h, dtype=dtype)
        self.out = linear(n, h, d, inputs=2)
        self.post_attention_norm = param(d, dtype=dtype)
        self.pre_mlp_norm = param(d, dtype=dtype)
        self.gate, self.up, self.down = linear(d, f), linear(d, f), linear(f, d)
        self.post_mlp_norm = param(d, dtype=dtype)
        self.eps = config.rms_norm_eps

    def __call__(
        self,
        x: Float[Array, "B M D"],
        angles: tuple[Float[Array, "B M 2 H4"], Float[Array, "B M 2 H4"]],
        real: Bool[Array, "B M"],
    ) -> Float[Array, "B M D"]:
        h = rms_norm(x, self.pre_attention_norm[...], self.eps)
        q = _turn(rms_norm(self.q(h), self.q_norm[...], self.eps), angles)
        k = _turn(rms_norm(self.k(h), self.k_norm[...], self.eps), angles)
        v = rms_norm(self.v(h), None, self.eps)
        h = self.out(attend_to_all(q, k, v, real))
        x = x + rms_norm(h, self.post_attention_norm[...], self.eps)
        h = rms_norm(x, self.pre_mlp_norm[...], self.eps)
        h = self.down(gelu_tanh(self.gate(h)) * self.up(h))
        return x + rms_norm(h, self.post_mlp_norm[...], self.eps)


@traced_once
def _run_layer(
    layer: TowerLayer,
    x: Float[Array, "B M D"],
    angles: tuple[Float[Array, "B M 2 H4"], Float[Array, "B M 2 H4"]],
    real: Bool[Array, "B M"],
) -> Float[Array, "B M D"]:
    return layer(x, angles, real)


class Linear(nnx.Module):
    """A product of the last axes of x with the first axes of a weight, between two clips if any.

    `ranges` has the least and the most of what goes in, and then of what comes out.
    """

    def __init__(self, *shape: int, inputs: int = 1, clipped: bool, dtype: jnp.dtype):
        self.weight = param(
            *shape,
            dtype=dtype,
            fan_in=math.prod(shape[:inputs]),
            contracting_axes=tuple(range(inputs)),
        )
        if clipped:
            self.ranges = param(4, dtype=dtype)
        self.inputs, self.clipped = inputs, clipped

    def __call__(self, x: Float[Array, "B M *inputs"]) -> Float[Array, "B M *outputs"]:
        if not self.clipped:
            return project(x, self.weight[...], inputs=self.inputs)
        low_in, high_in, low_out, high_out = self.ranges[...]
        out = project(jnp.clip(x, low_in, high_in), self.weight[...], inputs=self.inputs)
        return jnp.clip(out, low_out, high_out)


def attend_to_all(
    q: Float[Array, "B M N H"],
    k: Float[Array, "B M N H"],
    v: Float[Array, "B M N H"],
    real: Bool[Array, "B M"],
) -> Float[Array, "B M N H"]:
    """Attend from each patch to all real patches, with scores that are not scaled.

    For numbers of 16 bits on an NVIDIA GPU from Ampere on, cuDNN's flash attention computes it.
    """
    if q.dtype.itemsize != 2 or q.shape[-1] % 8 or (capability() or 0.0) < 8.0:
        return attend_in_blocks(q, k, v, real)

    def run(*args: Array) -> Array:
        return lax.platform_dependent(*args, cuda=_attend_by_cudnn, default=attend_in_blocks)

    return on_each_device(run, (q, k, v, real), WHOLE, WHOLE)


def _attend_by_cudnn(
    q: Float[Array, "B M N H"],
    k: Float[Array, "B M N H"],
    v: Float[Array, "B M N H"],
    real: Bool[Array, "B M"],
) -> Float[Array, "B M N H"]:
    # An image without patches is padding of a batch. Its result means nothing, but is no NaN.
    lengths = jnp.maximum(jnp.sum(real, axis=1, dtype=jnp.int32), 1)
    return jax.nn.dot_product_attention(
        q, k, v, scale=1.0, key_value_seq_lengths=lengths, implementation="cudnn"
    )


def attend_in_blocks(
    q: Float[Array, "B M N H"],
    k: Float[Array, "B M N H"],
    v: Float[Array, "B M N H"],
    real: Bool[Array, "B M"],
) -> Float[Array, "B M N H"]:
    """Compute `attend_to_all` with float32 scores. This is the reference.

    Queries are taken block by block, so that memory does not grow with their square.
    """
    m = q.shape[1]
    blocks = -(-m // QUERY_BLOCK)
    if blocks == 1:
        return _attend(q, k, v, real)
    size = -(-m // blocks)
    padded = jnp.pad(q, ((0, 0), (0, blocks * size - m), (0, 0), (0, 0)))
    of_block = jnp.moveaxis(padded.reshape(q.shape[0], blocks, size, *q.shape[2:]), 1, 0)
    out = jnp.moveaxis(lax.map(lambda block: _attend(block, k, v, real), of_block), 0, 1)
    return out.reshape(padded.shape)[:, :m]


def _attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B M N H"],
    v: Float[Array, "B M N H"],
    real: Bool[Array, "B M"],
) -> Float[Array, "B T N H"]:
    scores = contract("btnh,bmnh->bntm", q, k)
    scores = jnp.where(real[:, None, None, :], scores, -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return contract("bntm,bmnh->btnh", weights, v).astype(v.dtype)


def _angles(
    positions: Int[Array, "B M 2"], config: Gemma4VisionConfig
) -> tuple[Float[Array, "B M 2 H4"], Float[Array, "B M 2 H4"]]:
    """Return cosine and sine of the angles by which halves of heads turn: by x, and by y."""
    frequencies = rope_frequencies(config.head_dim // 2, config.rope_theta)
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def _turn(
    x: Float[Array, "B M N H"], angles: tuple[Float[Array, "B M 2 H4"], Float[Array, "B M 2 H4"]]
) -> Float[Array, "B M N H"]:
    """Turn the first half of each head by x, the second by y."""
    cos, sin = angles
    halves = jnp.split(x, 2, axis=-1)
    turned = [rotate(half, cos[:, :, i], sin[:, :, i]) for i, half in enumerate(halves)]
    return jnp.concatenate(turned, axis=-1)


def _pool(
    x: Float[Array, "B M D"], positions: Int[Array, "B M 2"], side: int
) -> Float[Array, "B R D"]:
    """Return the means of squares of patches, row by row of squares.

    Patches come row by row too, so the squares' places follow from the width of the image. The
    places of padding are beyond the image, and hold anything.
    """
    if side == 1:
        return x
    count = x.shape[1] // side**2
    columns = (jnp.max(positions[..., 0], axis=1, keepdims=True) + 1) // side  # of squares: B 1
    square = jnp.arange(count, dtype=jnp.int32)[None, :]
    row, column = square // columns, square % columns
    within = jnp.arange(side, dtype=jnp.int32)
    patch_rows = (row * side)[..., None, None] + within[:, None]
    patch_columns = (column * side)[..., None, None] + within[None, :]
    patches = patch_rows * (columns * side)[..., None, None] + patch_columns
    index = jnp.minimum(patches, x.shape[1] - 1).reshape(x.shape[0], -1)
    parts = jnp.take_along_axis(x, index[..., None], axis=1)
    parts = parts.reshape(x.shape[0], count, side**2, x.shape[-1])
    return jnp.mean(parts.astype(jnp.float32), axis=2).astype(x.dtype)
