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
from jaxspec.weights.manifest import Manifest
from jaxspec.weights.model_def import ModelDef


@dataclass(frozen=True)
class NativeSource:
    """A directory in jaxspec's format, as a `source.WeightSource`."""

    directory: Path
    manifest: Manifest

    @property
    def family(self) -> Family:
        return get_family(self.manifest.kind)

    @property
    def config(self) -> ModelConfig:
        return self.manifest.config

    @property
    def generation(self) -> GenerationDefaults | None:
        return self.manifest.generation

    @property
    def kv_scales(self) -> tuple[tuple[float, float], ...] | None:
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
