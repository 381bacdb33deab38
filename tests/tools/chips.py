"""Descriptions of GPUs, to compile for them without having one."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from typing import Any

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec

CUDA_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


def has_cuda_wheels() -> bool:
    """Tell whether the CUDA wheels are installed."""
    if importlib.util.find_spec("jax_plugins") is None:
        return False
    return any(importlib.util.find_spec(name) is not None for name in CUDA_PLUGINS)


@dataclasses.dataclass(frozen=True)
class Chip:
    """A GPU. Numbers are from CUDA's device properties and the programming guide's table.

    Attributes:
      name: one that jax knows.
      accelerated: whether its architecture has features of its own ("sm_90a").
      shared_kib: the most shared memory of a block of threads.
      threads: the most of a processor.
    """

    name: str
    capability: str
    processors: int
    shared_kib: int
    accelerated: bool = False
    threads: int = 2048
    memory_gb: int = 24
    gb_a_second: int = 1000
    l2_mb: int = 48
    clock_ghz: float = 1.98

    @property
    def described(self) -> str:
        major, minor = self.capability.split(".")
        features = "feature_extension: ACCELERATED_FEATURES" if self.accelerated else ""
        return f"""
platform_name: "CUDA"
device_description_str: "{self.name}"
dnn_version_info {{ major: 9 minor: 10 }}
gpu_device_info {{
  name: "{self.name}"
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {self.capability}{"a" if self.accelerated else ""}"
  cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  core_count: {self.processors}
  fpus_per_core: 128
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory_gb}000000000
  memory_bandwidth: {self.gb_a_second}000000000
  l2_cache_size: {self.l2_mb << 20}
  shared_memory_per_core: {(self.shared_kib + 1) << 10}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {self.shared_kib << 10}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: {self.threads}
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  device_address_bits: 64
}}
"""

    def arrays(self, tree: Any) -> Any:
        """Return shapes and dtypes on one such GPU."""
        on = _sharding(self)
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=on), tree)

    @property
    def named(self) -> AbstractMesh:
        """The name of the GPU, which Pallas asks for before XLA does."""
        about = AbstractDevice(self.name, self.processors, "cuda")
        return AbstractMesh((), (), abstract_device=about)

    def compile(self, run: Any, *args: Any, **options: Any) -> Any:
        """Compile a function of such arrays. Options are those of jit."""
        with jax.sharding.use_abstract_mesh(self.named):
            return jax.jit(run, **options).lower(*self.arrays(args)).compile()


@functools.cache
def _sharding(chip: Chip) -> NamedSharding:
    """Return how an array lies on one such GPU."""
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=chip.described, topology="1x1x1"
        )
    except NotImplementedError as error:  # its plugin looked for a driver and gave up
        pytest.skip(f"{error}: on a machine without a GPU set JAX_PLATFORMS=cpu")
    return NamedSharding(topologies.make_mesh(topology, (1,), ("x",)), PartitionSpec())


H200 = Chip("NVIDIA H200", "9.0", 132, 227, True, memory_gb=150, gb_a_second=4800, l2_mb=50)
# One GPU of each size of shared memory and each generation. L40S, L4 and RTX 40 cards are as the
# RTX 4090, A10 stands for RTX 30 cards and A40, and RTX PRO 6000 for RTX 50 cards.
OTHERS = (
    Chip("NVIDIA A100", "8.0", 108, 163, memory_gb=80, gb_a_second=2000, l2_mb=40),
    Chip("NVIDIA A10", "8.6", 72, 99, threads=1536, gb_a_second=600, l2_mb=6),
    Chip("NVIDIA GeForce RTX 4090", "8.9", 128, 99, threads=1536, l2_mb=72),
    Chip("NVIDIA RTX PRO 6000", "12.0", 188, 99, True, threads=1536, memory_gb=96, l2_mb=128),
    Chip("NVIDIA B200", "10.0", 148, 227, True, memory_gb=180, gb_a_second=8000, l2_mb=126),
)
