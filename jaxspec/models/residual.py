"""The residual stream of a model with norms on both sides of each part, such as Gemma 4's.

A layer reads as its equation:

    x = x.add(attention(x.normed), post_norm).norm(mlp_norm)    # x + post_norm(attention(x))
    x = x.add(mlp(x.normed), post_mlp_norm)

`add` computes nothing. `norm` adds and norms in one kernel (`pallas_kernels.norms.add_norm`), which
reads the stream once and writes the sum and all of its norms. XLA would make a kernel of each norm,
and compute the sum anew in each. A layer returns a `Sum`. Its caller norms that as the next layer
wants it.

The kernel also rounds a norm whose reader multiplies 8-bit floats (`layers.norm_for`), and what a
part made of such floats meets its scales there.

A model whose parts have one norm each, before them, needs none of this. There
`x + attention(rms_norm(x, scale, eps))` says all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from flax import struct

from jaxspec.mesh import ROWS, WHOLE, on_each_device
from jaxspec.shapes import Array, Float
from pallas_kernels.norms import Branch, NextNorm, add_norm, next_norm
from pallas_kernels.rounding import Rounded, Sums


class Residual(struct.PyTreeNode):
    """The stream between two parts of a layer, and its norms for the parts that read it next.

    Attributes:
      value: the stream itself.
      eps: of all norms.
      norms: `value`, normed once for each reader.
    """

    value: Float[Array, "B T D"]
    eps: float = struct.field(pytree_node=False)
    norms: tuple[Float[Array, "B T D"] | Rounded, ...] = ()

    @property
    def normed(self) -> Float[Array, "B T D"] | Rounded:
        """Return the stream, normed for its first reader."""
        return self.norms[0]

    def norm(self, *scales: NextNorm) -> Residual:
        """Norm the stream with the weights of its readers. Nothing was added to it."""
        norms = tuple(next_norm(self.value, scale, self.eps) for scale in scales)
        return self.replace(norms=norms)

    def add(
        self,
        branch: Float[Array, "B T D"] | Sums | tuple[Branch, ...],
        scale: Float[Array, " D"],
    ) -> Sum:
        """Add the output of a part of the layer, normed.

        Args:
          branch: the output; or those of several parts, each normed before they are added up.
          scale: the weight of the norm of `branch`.
        """
        return Sum(self, branch, scale)


@dataclass(frozen=True)
class Sum:
    """A stream and the branch to add to it. `norm` computes the sum and returns the new stream."""

    stream: Residual
    branch: Float[Array, "B T D"] | Sums | tuple[Branch, ...]
    scale: Float[Array, " D"]
    factor: Float[Array, " 1"] | None = None

    def times(self, factor: Float[Array, " 1"]) -> Sum:
        """Multiply the sum by a scalar."""
        return replace(self, factor=factor)

    def norm(self, *scales: NextNorm) -> Residual:
        """Add, and norm the sum with the weights of its readers; there need not be any."""
        eps, branch = self.stream.eps, self.branch
        args = self.stream.value, branch, self.scale, scales, self.factor

        def run(x: Array, branch: Any, scale: Array, scales: Any, factor: Array | None) -> Any:
            return add_norm(x, branch, scale, scales, eps=eps, factor=factor)

        axes = ROWS, _axes_of(branch), WHOLE, WHOLE, WHOLE
        value, norms = on_each_device(run, args, axes, ROWS)
        return Residual(value, eps, norms)


def _axes_of(branch: Any) -> Any:
    """Return the names of the axes of what is added to the stream: all but weights are of rows."""
    if isinstance(branch, Sums):
        return Sums(ROWS, ROWS, WHOLE)
    if isinstance(branch, tuple):
        return tuple(Branch(_axes_of(x), WHOLE) for x, _ in branch)
    return ROWS
