"""Make meshes, place arrays on them by the table in `jaxspec.mesh`, and fetch arrays from them.

This module knows nothing of models.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxspec.cache import KVCache
from jaxspec.mesh import CACHE_AXES, MESH_AXES, partition
from jaxspec.shapes import Array, Params

T = TypeVar("T")


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
