"""Where arrays live: a mesh of devices, and one table from what an axis means to an axis of the mesh.

A mesh has the axes `data` (rows of the batch) and `model` (parts of every weight and cache); one device is
a mesh of 1 x 1. Weights name their axes where they are declared (`params.param`), caches and states here.
`RULES` says which of the named axes is split. Programs are compiled for arrays that are placed so, under
`jax.set_mesh(mesh)`, and XLA adds the communication: two sums a layer, and a few for the embedding and
the choice of tokens.

Read `RULES`, then `partition`. Models are not known here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxspec.cache import KVCache
from jaxspec.shapes import Array

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
"""Named axes of arrays, and the mesh axis that splits each: the first that can be split is, no other.

An axis can be split when it divides by the mesh axis. Where heads of keys and values do not (full layers
have 1 to 4), keys and values are whole on every device, and the queries of each head are split instead.
`inputs` is the last way out: what a matrix product sums over. It halves the reading like any other, and
costs a sum over devices. Norms have no named axes, nor have small matrices, which take less time to read
than such a sum: they are whole everywhere.
"""

CACHE_AXES = ("batch", "kv_heads", None, None)
T = TypeVar("T")


def make_mesh(*, data: int = 1, model: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """Return a mesh of `data` times `model` devices: all of `devices`, by default all there are.

    Raises:
      ValueError: there are more or fewer devices than that.
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
    """Make the mesh that is written as "data=2,model=4"; an axis that is not named has size 1.

    Raises:
      ValueError: it is not written so, or does not fit the devices.
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
    axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh | AbstractMesh
) -> PartitionSpec:
    """Apply `RULES` to an array whose axes have these names; None and missing ones are not split."""
    split: dict[int, str] = {}
    for name, mesh_axis in RULES:
        if name not in axes or mesh_axis in split.values():
            continue
        axis = axes.index(name)
        if shape[axis] % mesh.shape[mesh_axis] == 0:
            split[axis] = mesh_axis
    return PartitionSpec(*(split.get(i) for i in range(len(shape))))


def constrain(x: Array, *axes: str | None) -> Array:
    """Tell XLA how an activation with these axes is split; nothing without a mesh of ours."""
    mesh = jax.sharding.get_abstract_mesh()
    if set(mesh.axis_names) != set(MESH_AXES):
        return x
    return lax.with_sharding_constraint(x, partition(axes, x.shape, mesh))


def whole_rows(x: Array) -> Array:
    """Tell XLA that each row of an activation is whole on one device: a sum over devices ends here."""
    return constrain(x, "batch")


def state_shardings(state: Any, mesh: Mesh) -> Any:
    """Return where each array of a decoding state lives: rows over `data`, caches also by heads."""

    def of(x: Any) -> Any:
        axes = CACHE_AXES if isinstance(x, KVCache) else ("batch",)
        return jax.tree.map(lambda a: NamedSharding(mesh, partition(axes, a.shape, mesh)), x)

    return jax.tree.map(of, state, is_leaf=lambda x: isinstance(x, KVCache))


def place(array: Any, sharding: NamedSharding) -> Array:
    """Put an array of the host where it belongs, each shard straight onto its device.

    Every process gives the whole array, and devices of other processes are theirs to fill.
    """
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.device_put(array, sharding)  # has no form on the host
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def place_rows(tree: T, mesh: Mesh) -> T:
    """Put what the host knows about rows onto the mesh; arrays that are there already stay."""
    devices = set(mesh.devices.flat)

    def put(x: Any) -> Array:
        if isinstance(x, jax.Array) and x.sharding.device_set == devices:
            return x
        return place(x, NamedSharding(mesh, partition(("batch",)[: np.ndim(x)], np.shape(x), mesh)))

    return jax.tree.map(put, tree)


def fetch(tree: T) -> T:
    """Bring arrays to the host, whole; every process has to call it when some shards are not its own."""
    leaves, structure = jax.tree.flatten(tree)
    for i, x in enumerate(leaves):
        if not x.is_fully_addressable:
            everywhere = NamedSharding(x.sharding.mesh, PartitionSpec())
            leaves[i] = jax.jit(lambda a: a, out_shardings=everywhere)(x).addressable_data(0)
    return jax.tree.unflatten(structure, jax.device_get(leaves))


def mesh_of(**params: Mapping[str, Array] | None) -> Mesh:
    """Return the mesh that models' weights are on; weights on one device are on a mesh of 1 x 1.

    Raises:
      ValueError: they are on different devices, or on a mesh with other axes.
    """
    placed: dict[Any, str] = {}
    for model, weights in params.items():
        for name, x in (weights or {}).items():
            placed.setdefault(x.sharding, f"{model} {name}")
    meshes: dict[Mesh, str] = {}
    for sharding, name in placed.items():
        if len(sharding.device_set) == 1:
            mesh = make_mesh(devices=list(sharding.device_set))
        elif isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            mesh = sharding.mesh
        else:
            raise ValueError(f"{name} is placed by {sharding}; expected a NamedSharding")
        if mesh.axis_names != MESH_AXES:
            raise ValueError(
                f"{name} is on a mesh with axes {', '.join(map(str, mesh.axis_names))}; expected "
                "data and model, as jaxspec.sharding.make_mesh has them"
            )
        meshes.setdefault(mesh, name)
    if len(meshes) > 1:
        found = [f"{name} on {_described(mesh)}" for mesh, name in meshes.items()]
        raise ValueError(
            f"weights are not on the same devices: {'; '.join(found)}. Load all with the same mesh"
        )
    return next(iter(meshes))


def _described(mesh: Mesh) -> str:
    sizes = ",".join(f"{name}={size}" for name, size in mesh.shape.items())
    ids = ", ".join(str(d.id) for d in mesh.devices.flat)
    return f"mesh {sizes} (device {ids})"
