"""Place arrays on a mesh of devices. One table, `RULES`, maps named array axes to mesh axes.

A mesh has the axes `data` (rows of the batch) and `model` (parts of every weight and cache). One
device is a mesh of 1 x 1. The axes of weights are named where the weights are declared
(`model_def.param`). The axes of caches and states are named here. `RULES` says which of the named axes
is split. Programs are compiled under `jax.set_mesh(mesh)` for arrays that are placed by these
rules. XLA adds the communication: two sums per layer, and a few for the embedding and the choice of
tokens. Kernels run on one device, so operations that have some go through `on_each_device`.

Read `RULES`, then `partition`. This module knows nothing of models.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxspec.cache import KVCache
from jaxspec.shapes import Array, Params
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


def make_mesh(*, data: int = 1, model: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """Return a mesh of `data` times `model` devices.

    Args:
      devices: the devices, all of which the mesh uses. None: all devices that JAX has.

    Raises:
      ValueError: `data` or `model` is less than 1, or `data` times `model` is not the number of
        devices.
    """
    devices = jax.devices() if devices is None else devices
    if data < 1 or model < 1:
        raise ValueError(f"mesh data={data},model={model}: both must be 1 or more")
    if data * model != len(devices):
        raise ValueError(
            f"mesh data={data},model={model} is {data * model} devices, but there "
            f"{'is' if len(devices) == 1 else 'are'} {len(devices)} ({devices[0].device_kind})"
        )
    return jax.make_mesh(
        (data, model), MESH_AXES, axis_types=(AxisType.Auto, AxisType.Auto), devices=devices
    )


def parse_mesh(text: str) -> Mesh:
    """Make a mesh from text like "data=2,model=4". An axis that is not named has size 1.

    Raises:
      ValueError: the text is malformed, or the mesh does not fit the devices.
    """
    sizes: dict[str, Any] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name not in MESH_AXES:
            raise ValueError(f"mesh {text!r}: no axis {name!r}; the axes are data and model")
        if name in sizes:
            raise ValueError(f"mesh {text!r} names {name} twice")
        if not size.isdecimal():
            raise ValueError(f"mesh {text!r}: {name} needs a size, as in data=2,model=4")
        sizes[name] = int(size)
    return make_mesh(**sizes)


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
    added_up = tuple(part for name in contracting for part in split.get(str(name), ()))

    def local(*args: Any) -> T:
        out = run(*args)
        return lax.psum(out, added_up) if added_up else out

    of_result = jax.tree.map(lambda names: _spec(names, split), result)
    of_args = jax.tree.unflatten(structure, [_spec(n, split) for n in names])
    mapped = jax.shard_map(local, in_specs=of_args, out_specs=of_result, check_vma=False)
    return mapped(*args)


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


def state_shardings(state: Any, mesh: Mesh) -> Any:
    """Return where each array of a decoding state lives.

    Rows are split over `data`. Heads of caches are split over `model`, where `RULES` allows.
    """

    def of(x: Any) -> Any:
        axes = CACHE_AXES if isinstance(x, KVCache) else ("batch",)
        return jax.tree.map(lambda a: NamedSharding(mesh, partition(axes, a.shape, mesh)), x)

    return jax.tree.map(of, state, is_leaf=lambda x: isinstance(x, KVCache))


def place(array: Any, sharding: NamedSharding) -> Array:
    """Copy an array from the host to devices, each shard straight onto its own device.

    Every process passes the whole array, and fills only its own devices.
    """
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.device_put(array, sharding)  # a key array has no form on the host
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def own_context(mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which `mesh` replaces the mesh that a caller set by `jax.set_mesh`.

    If the caller set none, the context does nothing.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    return jax.set_mesh(mesh)


def place_rows(tree: T, mesh: Mesh) -> T:
    """Place arrays of rows on the mesh, split over `data`.

    Arrays that are already on the mesh are not moved.
    """
    devices = set(mesh.devices.flat)

    def is_placed(x: Any) -> bool:
        if not isinstance(x, jax.Array) or x.sharding.device_set != devices:
            return False
        of_x = x.sharding.mesh if isinstance(x.sharding, NamedSharding) else mesh
        return isinstance(of_x, Mesh) and decoding_mesh(of_x) is of_x

    leaves, structure = jax.tree.flatten(tree)
    indices = [i for i, x in enumerate(leaves) if not is_placed(x)]
    if not indices:
        return tree
    unplaced = [leaves[i] for i in indices]
    shardings = [_sharding_of_rows(np.shape(x), mesh) for x in unplaced]
    if shardings[0].is_fully_addressable:  # one call for all of them is several times quicker
        placed = jax.device_put(unplaced, shardings)
    else:
        placed = [place(x, sharding) for x, sharding in zip(unplaced, shardings, strict=True)]
    for i, x in zip(indices, placed, strict=True):
        leaves[i] = x
    return jax.tree.unflatten(structure, leaves)


@functools.lru_cache(maxsize=1024)
def _sharding_of_rows(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, partition(("batch",)[: len(shape)], shape, mesh))


def fetch(tree: T) -> T:
    """Copy whole arrays to the host.

    If some shards are on devices of other processes, every process must call this function.
    """
    leaves, structure = jax.tree.flatten(tree)
    for i, x in enumerate(leaves):
        if not x.is_fully_addressable:
            everywhere = NamedSharding(x.sharding.mesh, PartitionSpec())
            leaves[i] = jax.jit(lambda a: a, out_shardings=everywhere)(x).addressable_data(0)
    return jax.tree.unflatten(structure, jax.device_get(leaves))


def decoding_mesh(mesh: Mesh) -> Mesh:
    """Return a mesh for decoding, with axes `data` and `model`, over the devices of another mesh.

    The mesh of a training program may have other axes, such as `fsdp`. Its axes may also be of a
    type that decoding does not use, such as `AxisType.Explicit`, the default of `jax.make_mesh`.
    The axis `model` keeps its size, and all other axes together become `data`. A mesh that already
    suits decoding is returned unchanged.
    """
    if mesh.axis_names == MESH_AXES and set(mesh.axis_types) == {AxisType.Auto}:
        return mesh
    others = [i for i, name in enumerate(mesh.axis_names) if name != "model"]
    order = [*others, *(i for i, name in enumerate(mesh.axis_names) if name == "model")]
    devices = mesh.devices.transpose(order).reshape(-1, mesh.shape.get("model", 1))
    return Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto, AxisType.Auto))


def on_decoding_mesh(params: Params) -> Params:
    """Return the weights with `decoding_mesh` in place of the mesh they name.

    No weight moves or is copied. `mesh_of` says which meshes can be replaced.
    """
    arrays, structure = jax.tree.flatten(params)
    moved = {}
    for i, x in enumerate(arrays):
        sharding = x.sharding
        if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
            continue
        if (ours := decoding_mesh(sharding.mesh)) is not sharding.mesh:
            moved[i] = NamedSharding(ours, _without_other_axes(sharding.spec))
    if not moved:
        return params
    for i, x in jax.device_put({i: arrays[i] for i in moved}, moved).items():
        arrays[i] = x
    return jax.tree.unflatten(structure, arrays)


def _without_other_axes(spec: PartitionSpec) -> PartitionSpec:
    """Remove the axes that decoding does not know from a spec. These axes have size 1."""

    def of(entry: Any) -> Any:
        names = entry if isinstance(entry, tuple) else (entry,)
        kept = tuple(name for name in names if name in MESH_AXES)
        return kept[0] if len(kept) == 1 else kept or None

    return PartitionSpec(*map(of, spec))


def mesh_of(**params: Params | None) -> Mesh:
    """Return the decoding mesh that the weights of all models are on.

    The mesh has the axes `data` and `model`. Weights on one device are on a mesh of 1 x 1. The
    weights may also be on a mesh with other axes of size 1, or with explicit axes. The result is
    then the `decoding_mesh` of that mesh.

    Args:
      params: the weights of each model, by the name that error messages use. None: no such model.

    Raises:
      ValueError: weights are on different devices, have a sharding that is not a `NamedSharding`,
        or are on a mesh where an axis of another name has more than one device.
    """
    placed: dict[Any, str] = {}
    for model, weights in params.items():
        for name, weight in (weights or {}).items():
            for x in jax.tree.leaves(weight):
                placed.setdefault(x.sharding, f"{model} {name}")
    meshes: dict[Mesh, str] = {}
    for sharding, name in placed.items():
        if len(sharding.device_set) == 1:
            mesh = make_mesh(devices=list(sharding.device_set))
        elif isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            mesh = sharding.mesh
        else:
            raise ValueError(
                f"{name} is placed by {sharding}; expected a NamedSharding. {_way_out(name)}"
            )
        if any(size > 1 and axis not in MESH_AXES for axis, size in mesh.shape.items()):
            raise ValueError(
                f"{name} is on a mesh with axes {', '.join(map(str, mesh.axis_names))}; expected "
                f"data and model. {_way_out(name)}"
            )
        meshes.setdefault(decoding_mesh(mesh), name)
    if len(meshes) > 1:
        locations = [f"{name} on {_described(mesh)}" for mesh, name in meshes.items()]
        raise ValueError(
            f"weights are not on the same devices: {'; '.join(locations)}. Load all with the same mesh, or "
            "put each model's there by jaxspec.place_params(params, model_def, mesh)"
        )
    return next(iter(meshes))


def _way_out(name: str) -> str:
    model = name.split()[0]
    return (
        "Put them where decoding wants them first: "
        f"{model}_params = jaxspec.place_params({model}_params, {model}.model_def, mesh)"
    )


def _described(mesh: Mesh) -> str:
    sizes = ",".join(f"{name}={size}" for name, size in mesh.shape.items())
    ids = ", ".join(str(d.id) for d in mesh.devices.flat)
    return f"mesh {sizes} (device {ids})"
