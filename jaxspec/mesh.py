"""Say which axes of arrays a mesh splits, and run operations on each of its devices.

A mesh has the axes `data` (rows of the batch) and `model` (parts of every weight and cache). One
device is a mesh of 1 x 1. One table, `RULES`, maps named array axes to mesh axes. The axes of
weights are named where the weights are declared (`weights.model_def.param`). Those of activations
are named where operations take them. `weights.sharding` places arrays by the same table. Programs
are compiled under `jax.set_mesh(mesh)`. XLA adds the communication: two sums per layer, and a few for
the embedding and the choice of tokens. Kernels run on one device, so operations that have some go
through `on_each_device`.

Read `RULES`, then `partition`. This module knows nothing of models.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from jaxspec.shapes import Array, Int
from pallas_kernels.rounding import Rounded, Sums

MESH_AXES = ("data", "model")

RULES: tuple[tuple[str, str], ...] = (
    ("batch", "data"),
    ("experts", "model"),
    ("kv_heads", "model"),
    ("query_groups", "model"),
    ("mlp", "model"),
    ("vocab", "model"),
    ("inputs", "model"),
)
"""Named axes of arrays, and the mesh axis that may split each, in order of preference.

A mesh axis splits at most one axis of an array: the first in this table that can be split. An axis
can be split if its size is a multiple of the size of the mesh axis. Full layers have only 1 to 4
heads of keys and values. If these heads cannot be split, keys and values are whole on every device,
and the queries of each head are split instead.

`inputs`, the axis that a matrix product sums over, is the last resort. Splitting it saves as much
reading as any other split, but costs a sum over devices. Norms and small matrices have no named
axes, so they are whole on every device. Reading a small matrix takes less time than such a sum.
"""

Axes = PartitionSpec
"""The names in `RULES` of an array's axes. JAX does not look into one, as it does into a tuple."""
# Any, because they stand in the places of arrays, see `on_each_device`.
WHOLE: Any = Axes()
ROWS: Any = Axes("batch")
CACHE_AXES: Any = Axes("batch", "kv_heads", None, None)
T = TypeVar("T")
Activation = TypeVar("Activation", bound=Array | Rounded | Sums)


def partition(
    axes: Axes | tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh | AbstractMesh
) -> PartitionSpec:
    """Apply `RULES` to an array.

    On a mesh with other axes than `MESH_AXES`, all axes but `model` together are `data`.

    Args:
      axes: the names of the array's axes. An axis that is None or missing is not split.
    """
    axes = Axes(*axes)
    spec = _spec(axes, _split([(axes, shape)], mesh))
    return PartitionSpec(*spec, *[None] * (len(shape) - len(spec)))


def _split(
    arrays: Sequence[tuple[Axes, tuple[int, ...]]], mesh: Mesh | AbstractMesh
) -> dict[str, tuple[str, ...]]:
    """Apply `RULES` to arrays that meet in one operation, given the names and sizes of their axes.

    An axis of one name is split in all of them, or in none.

    Returns:
      The mesh axes that split each name, for the names that are split.
    """
    split: dict[str, tuple[str, ...]] = {}
    for name, mesh_axis in RULES:
        parts = tuple(a for a in mesh.axis_names if (a == "model") == (mesh_axis == "model"))
        sizes = [shape[axes.index(name)] for axes, shape in arrays if name in axes]
        if not sizes or not parts or parts in split.values():
            continue
        devices = math.prod(mesh.shape[part] for part in parts)
        if all(size % devices == 0 for size in sizes):
            split[name] = parts
    return split


def _spec(axes: Axes, split: dict[str, tuple[str, ...]]) -> PartitionSpec:
    entries = (() if name is None else split.get(name, ()) for name in axes)
    return PartitionSpec(*(e[0] if len(e) == 1 else e or None for e in entries))


def on_each_device(
    run: Callable[..., T],
    args: tuple[Any, ...],
    axes: Any,
    result: Any,
    *,
    contracting: Axes = WHOLE,
) -> T:
    """Call an operation on every device of the mesh, with that device's parts of the arguments.

    Kernels run on one device. So an operation that has kernels is called through this function. It
    then chooses a kernel by the shapes of the parts. Where no mesh is left to XLA, `run` gets the
    arguments as they are.

    Args:
      run: the operation. Each part of its result follows from the same parts of the arguments.
      axes: the names of the axes of all arrays in `args`: a tree of `Axes`. One `Axes` may stand
        for a whole branch of `args`. Arrays that share a name are split alike (`RULES`).
      result: the names of the axes of the result, likewise.
      contracting: names that the operation sums over. Where one is split, the results of the devices are
        added up.
    """
    mesh = mesh_left_to_xla()
    if mesh is None or mesh.size == 1:
        return run(*args)
    leaves, structure = jax.tree.flatten(args)
    names = jax.tree.leaves(jax.tree.broadcast(axes, args))
    split = _split([(n, x.shape) for n, x in zip(names, leaves, strict=True)], mesh)
    split_by = [part for name in contracting for part in split.get(str(name), ())]
    # XLA does not always drop a sum over one device.
    added_up = tuple(part for part in split_by if mesh.shape[part] > 1)

    def local(*args: Any) -> T:
        out = run(*args)
        return lax.psum(out, added_up) if added_up else out

    of_result = jax.tree.map(lambda names: _spec(names, split), result)
    of_args = jax.tree.unflatten(structure, [_spec(n, split) for n in names])
    mapped = jax.shard_map(local, in_specs=of_args, out_specs=of_result, check_vma=False)
    return mapped(*args)


def on_each_part(
    run: Callable[..., T], args: tuple[Any, ...], axes: Any = ROWS, result: Any = ROWS
) -> T:
    """Call an operation on every part of a batch, in which numbers of rows and pages count those of that part.

    A pass over some rows of a state has as many of each part, in the order of the parts. No row, and
    no page of its keys and values, is then sent to another device. The arguments are as in
    `on_each_device`. Where rows are not split, `run` gets `args` as they are.
    """
    return run(*args) if row_parts() == 1 else on_each_device(run, args, axes, result)


def rows_at(tree: T, slots: Int[Array, " b"]) -> T:
    """Return the rows of arrays in some slots, which are numbered as in `on_each_part`."""
    return on_each_part(lambda tree, slots: jax.tree.map(lambda x: x[slots], tree), (tree, slots))


def set_rows(tree: T, slots: Int[Array, " b"], rows: T) -> T:
    """Write rows of arrays into some slots, likewise. A slot past the last is dropped."""

    def put(tree: T, slots: Array, rows: T) -> T:
        return jax.tree.map(lambda x, new: x.at[slots].set(new, mode="drop"), tree, rows)

    return on_each_part(put, (tree, slots, rows))


def row_numbers(count: int) -> Int[Array, " count"]:
    """Return the number of each of so many rows in its part of the batch, see `on_each_part`."""
    numbers, parts = jnp.arange(count, dtype=jnp.int32), row_parts()
    return numbers if count % parts else numbers % (count // parts)


def mesh_left_to_xla() -> AbstractMesh | None:
    """Return the current mesh, or None where there is none or some of its axes are not XLA's.

    A function under `shard_map` has axes of type Manual: there every device has its own arrays.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if set(mesh.axis_types) == {AxisType.Auto} else None


def constrain(x: Activation, *axes: str | None) -> Activation:
    """Constrain how XLA splits an activation. Do nothing where no mesh is left to XLA.

    Of an activation with scales, the numbers are split so. XLA splits the scales accordingly.
    """
    if (mesh := mesh_left_to_xla()) is None:
        return x
    if isinstance(x, Rounded):
        return x._replace(codes=constrain(x.codes, *axes))
    if isinstance(x, Sums):
        return x._replace(sums=constrain(x.sums, *axes))
    return lax.with_sharding_constraint(x, partition(axes, x.shape, mesh))


def left_to_xla(run: Callable[..., T], *args: Any) -> T:
    """Call a function inside `jax.jit` with the axes of the mesh left to XLA.

    On a mesh with explicit axes every operation would have to say where its result lives. There the
    result of this call is whole on every device.
    """
    types = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(args))
    meshes = (jax.sharding.get_abstract_mesh(), *types)
    mesh = next((m for m in meshes if AxisType.Explicit in m.axis_types), None)
    if mesh is None:
        return run(*args)
    with jax.sharding.use_abstract_mesh(mesh):
        decide: Any = jax.sharding.auto_axes(run, out_sharding=PartitionSpec())
        return decide(*args)


def varying_as(tree: T, *inputs: Any) -> T:
    """Give constants the type of what is computed from inputs: under `shard_map` it varies by device.

    A loop whose state starts with constants would have another type after its first step. Nothing is
    computed. Do nothing outside of `shard_map`.
    """
    if AxisType.Manual not in jax.sharding.get_abstract_mesh().axis_types:
        return tree
    zeros = [lax.full_like(x, 0, jnp.int32, shape=()) for x in jax.tree.leaves(inputs)]
    zero = functools.reduce(lax.add, zeros)
    return jax.tree.map(lambda x: jnp.where(zero == 0, x, x), tree)


def row_parts() -> int:
    """Return how many devices the rows of a batch are split over, on the current mesh."""
    mesh = mesh_left_to_xla()
    sizes = () if mesh is None else mesh.shape.items()
    return math.prod(size for axis, size in sizes if axis != "model")


def whole_rows(x: Activation) -> Activation:
    """Constrain each row of an activation to be whole on one device.

    If the activation comes from a sum over devices, this call completes the sum.
    """
    return constrain(x, "batch")
