"""A directory in jaxspec's format as a source of weights: its manifest and its arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jax.sharding import Mesh

from jaxspec.configs.base import GenerationDefaults
from jaxspec.quantised import QuantisedArray
from jaxspec.registry import Family, ModelConfig, get_family
from jaxspec.shapes import Array
from jaxspec.weights.arrays import restore_weights
from jaxspec.weights.manifest import MANIFEST, Manifest
from jaxspec.weights.model_def import ModelDef
from jaxspec.weights.source import WeightSource


@dataclass(frozen=True)
class NativeSource(WeightSource):
    """A directory in jaxspec's format."""

    directory: Path
    manifest: Manifest
    family: Family
    config: ModelConfig
    generation: GenerationDefaults | None

    def kv_scales(self) -> tuple[tuple[float, float], ...] | None:
        """Return the scales, as `WeightSource.kv_scales` describes them."""
        return self.manifest.kv_scales

    def model_def(self, dtype: str, quantize: str | None = None) -> ModelDef:
        """Return the model definition, as `WeightSource.model_def` describes it.

        No weight has to be rounded again, so `quantize` does not matter.
        """
        del quantize
        return self.manifest.model_def(dtype)

    def weights(
        self, model_def: ModelDef, mesh: Mesh | None = None
    ) -> Iterator[tuple[str, Array | QuantisedArray]]:
        """Yield each weight by name, as `WeightSource.weights` describes it."""
        return restore_weights(self.directory, self.manifest.model_def(model_def.dtype), mesh)


def open_native_source(directory: Path) -> NativeSource:
    """Open a directory in jaxspec's format.

    Raises:
      CheckpointError: its manifest is missing or corrupt.
    """
    manifest = Manifest.read(directory)
    family = get_family(manifest.kind)
    return NativeSource(directory, manifest, family, manifest.config, manifest.generation)


VISION = "vision"
"""The directory, inside that of a target, which holds its vision part in the same format."""


def open_native_vision(directory: Path) -> NativeSource | None:
    """Open the vision part of a target's directory in jaxspec's format. Return None if it has none.

    Raises:
      CheckpointError: its manifest is corrupt.
    """
    inside = directory / VISION
    return open_native_source(inside) if (inside / MANIFEST).is_file() else None
