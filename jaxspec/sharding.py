"""Where arrays live: a mesh of devices, and one table from what an axis means to an axis of the mesh.

A mesh has the axes `data` (rows of the batch) and `model` (parts of every weight and cache); one device is
a mesh of 1 x 1. Weights name their axes where they are declared (`params.param`), caches and states here.
`RULES` says which of the named axes is split. Programs are compiled for arrays that are placed so, under
`jax.set_mesh(mesh)`, and XLA adds the communication: two sums a layer, and a few for the embedding and
the choice of tokens.

Read `RULES`, then `partition`. Models are not known here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxspec.cache import KVCache
from jaxspec.shapes import Array, Params

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


def own_context(mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a caller's `jax.set_mesh` does not count; nothing where there is none."""
    if jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    return jax.set_mesh(mesh)


def place_rows(tree: T, mesh: Mesh) -> T:
    """Put what the host knows about rows onto the mesh; arrays that are there already stay."""
    devices = set(mesh.devices.flat)

    def put(x: Any) -> Array:
        if isinstance(x, jax.Array) and x.sharding.device_set == devices:
            found = x.sharding.mesh if isinstance(x.sharding, NamedSharding) else mesh
            if isinstance(found, Mesh) and decoding_mesh(found) is found:
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


def decoding_mesh(mesh: Mesh) -> Mesh:
    """Return the mesh of `data` and `model` over the devices of another, for weights to be decoded with.

    A mesh of a training program may have other axes (`fsdp`, say), and types of axes that decoding does not
    use (`AxisType.Explicit`, which `jax.make_mesh` makes by default). `model` stays what it is, and all other
    axes together become `data`. A mesh that is such a one already is returned as it is.
    """
    if mesh.axis_names == MESH_AXES and set(mesh.axis_types) == {AxisType.Auto}:
        return mesh
    others = [i for i, name in enumerate(mesh.axis_names) if name != "model"]
    order = [*others, *(i for i, name in enumerate(mesh.axis_names) if name == "model")]
    devices = mesh.devices.transpose(order).reshape(-1, mesh.shape.get("model", 1))
    return Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto, AxisType.Auto))


def place_params(params: Params, graph: Any, mesh: Mesh) -> Params:
    """Put weights where decoding wants them, whatever mesh they come from.

    Weights that are there already are not copied. What an axis like `fsdp` split is brought together:
    decoding reads every weight in every step.

    Args:
      graph: of the model whose weights these are: `LoadedModel.graph`.
      mesh: any mesh of the devices, such as that of a training program; see `decoding_mesh`.
    """
    return jax.device_put(params, graph.shardings(decoding_mesh(mesh)))


def on_decoding_mesh(params: Params) -> Params:
    """Name the mesh of weights as decoding does, see `mesh_of`; no weight moves or is copied."""
    moved = {}
    for name, x in params.items():
        sharding = x.sharding
        if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
            continue
        if (ours := decoding_mesh(sharding.mesh)) is not sharding.mesh:
            moved[name] = NamedSharding(ours, _without_other_axes(sharding.spec))
    if not moved:
        return params
    return params | jax.device_put({name: params[name] for name in moved}, moved)


def _without_other_axes(spec: PartitionSpec) -> PartitionSpec:
    """Leave out of a spec the axes that decoding does not know; they have size 1."""

    def of(entry: Any) -> Any:
        names = entry if isinstance(entry, tuple) else (entry,)
        kept = tuple(name for name in names if name in MESH_AXES)
        return kept[0] if len(kept) == 1 else kept or None

    return PartitionSpec(*map(of, spec))


def mesh_of(**params: Mapping[str, Array] | None) -> Mesh:
    """Return the mesh that models' weights are on; weights on one device are on a mesh of 1 x 1.

    It has the axes `data` and `model`. An axis of another name is taken when its size is 1, and so is a mesh
    whose axes are explicit: `decoding_mesh` stands for it.

    Raises:
      ValueError: weights are on different devices, or split over an axis of another name.
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
        found = [f"{name} on {_described(mesh)}" for mesh, name in meshes.items()]
        raise ValueError(
            f"weights are not on the same devices: {'; '.join(found)}. Load all with the same mesh, or "
            "put each model's there by jaxspec.sharding.place_params(params, graph, mesh)"
        )
    return next(iter(meshes))


def _way_out(name: str) -> str:
    model = name.split()[0]
    return (
        "Put them where decoding wants them first: "
        f"{model}_params = jaxspec.sharding.place_params({model}_params, {model}.graph, mesh)"
    )


def _described(mesh: Mesh) -> str:
    sizes = ",".join(f"{name}={size}" for name, size in mesh.shape.items())
    ids = ", ".join(str(d.id) for d in mesh.devices.flat)
    return f"mesh {sizes} (device {ids})"
