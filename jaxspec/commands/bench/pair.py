"""The models of a benchmark: loaded, or random weights in the shapes of released ones."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxspec.api import BUNDLED
from jaxspec.cache import RING_MULTIPLE
from jaxspec.commands.bench import PROMPT_LENGTH
from jaxspec.commands.models import ModelOptions
from jaxspec.commands.options import UsageError
from jaxspec.commands.startup import load_models, mesh_for
from jaxspec.configs.base import GenerationDefaults
from jaxspec.options import Drafting, ProgramFeatures, Sampling
from jaxspec.registry import families, family_of, presets
from jaxspec.runtime import memory
from jaxspec.runtime.runtime import cache_length_for, make_spec
from jaxspec.shapes import Params
from jaxspec.state import DecodeSpec
from jaxspec.weights.define import model_def_of, quantised_def, random_drafter, with_kv_dtype
from jaxspec.weights.draft_head import check_borrows, model_def_with_head
from jaxspec.weights.loading import LoadedModel, default_dtype
from jaxspec.weights.model_def import ModelDef
from jaxspec.weights.sharding import make_mesh, mesh_of


def bench_cache_length(spec: DecodeSpec, positions: int) -> int:
    """Return the length of caches for so many positions and a step's own tokens."""
    return cache_length_for(spec, positions, multiple=RING_MULTIPLE)


@dataclass(frozen=True)
class ModelPair:
    """A target and its drafter, or a target alone, with names for the report."""

    spec: DecodeSpec
    target_params: Params
    drafter_params: Params | None
    target_name: str
    drafter_name: str | None
    held_out: tuple[tuple[int, ...], ...] = ()  # prompts outside the training of the bundled pair
    sampling: Sampling = Sampling()
    vision_params: Params | None = None  # of the spec's vision part

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The devices that the weights are on."""
        return mesh_of(target=self.target_params, drafter=self.drafter_params)

    @property
    def drafter_kind(self) -> str | None:
        """The drafter's family."""
        return self.spec.drafter and family_of(self.spec.drafter.config).name

    @property
    def label(self) -> str:
        """The drafter and its draft tokens, as in "mtp 7"."""
        if self.spec.drafter is None:
            return "plain"
        shape = "tree " if self.spec.tree else ""
        return f"{self.drafter_kind} {shape}{self.spec.num_draft_tokens}"

    @property
    def title(self) -> str:
        """Both models, and the drafts of a step."""
        if self.spec.drafter is None:
            return f"{self.target_name} + no drafter"
        drafts = (
            f"{self.target_name} + {self.drafter_name}: {self.spec.num_draft_tokens} drafts a step"
        )
        tree = self.spec.tree
        return f"{drafts}, a tree of topk {tree.topk} and depth {tree.depth}" if tree else drafts

    @property
    def loaded(self) -> tuple[LoadedModel, LoadedModel | None]:
        """The models as an engine takes them."""
        target = _loaded(self.spec.target, self.target_params, self.target_name)
        generation = GenerationDefaults(suppress_tokens=self.spec.suppress_tokens)
        vision = None
        if self.spec.vision is not None:
            assert self.vision_params is not None
            vision = _loaded(self.spec.vision, self.vision_params, self.target_name)
        target = dataclasses.replace(target, generation=generation, vision=vision)
        if self.spec.drafter is None:
            return target, None
        assert self.drafter_params is not None
        return target, _loaded(self.spec.drafter, self.drafter_params, self.drafter_name or "")

    def plain(self) -> ModelPair:
        """Return the target alone."""
        spec = dataclasses.replace(self.spec, drafter=None, drafting=Drafting())
        return dataclasses.replace(self, spec=spec, drafter_params=None)

    def prompts(self, count: int, length: int | None, seed: int) -> np.ndarray:
        """Return [count, length] prompt ids: held-out ones if there are any, else random.

        Args:
          length: None for `PROMPT_LENGTH`, or the length of the held-out prompts.

        Raises:
          UsageError: the held-out prompts are shorter.
        """
        if self.held_out:
            limit = min(map(len, self.held_out))
            if length is not None and length > limit:
                raise UsageError(
                    f"--prompt-length {length}: the prompts of the bundled target have {limit} "
                    "tokens; give at most that, or leave it out"
                )
            length = limit if length is None else length
            rows = [self.held_out[i % len(self.held_out)][:length] for i in range(count)]
            return np.asarray(rows, np.int32)
        length, rng = length or PROMPT_LENGTH, np.random.default_rng(seed)
        return rng.integers(
            self.spec.target.config.vocab_size, size=(count, length), dtype=np.int32
        )


def make_pair(
    models: ModelOptions,
    drafting: Drafting,
    preset: str | None = None,
    *,
    sampling: Sampling = Sampling(),
    seed: int = 0,
    rows: int = 1,
    positions: int = 1,
    with_weights: bool = True,
    images: bool = False,
) -> ModelPair:
    """Load a pair or make a random one.

    Args:
      preset: of a target with random weights; its drafter's are random too.
      rows, positions: of the largest case, a step's own tokens not counted. Sizes that no device
        holds are refused before random weights and caches are made.
      with_weights: False for shapes in place of weights, and sizes that no device need hold.
      images: whether to have the target's vision part too, if it has one.

    Raises:
      ValueError: the options do not fit each other, a model cannot be loaded, or memory is too
        small.
    """
    kinds = [f.name for f in reversed(families("drafter")) if f.drafter_for]
    of_files = (models.target, models.revision, models.drafter_revision, models.token)
    if preset is not None and (
        any(of_files) or models.offline or models.drafter not in (None, *kinds, "none")
    ):
        raise UsageError(
            "--random-weights makes both models itself: give no --target and no options of the "
            f"hub, and as --drafter only {', '.join(kinds)} or none"
        )
    if preset is not None and preset not in presets():
        raise UsageError(
            f"--random-weights {preset} is not known; expected one of {', '.join(presets())}"
        )
    models.check_drafter(drafting)
    mesh = mesh_for(models)
    dtype = models.dtype or default_dtype()
    held_out: tuple[tuple[int, ...], ...] = ()
    model, target_params, drafter_def, drafter_params, drafter_name = (None,) * 5
    if preset is not None:
        target_def = quantised_def(
            model_def_of(presets()[preset], dtype),
            preset,
            models.quantize,
            models.quantize_head,
            "quantize",
        )
        target_def = with_kv_dtype(target_def, models.kv_dtype)
        target_name = f"{preset}, random weights{models.quantized}"
        kind = models.drafter or family_of(target_def.config).usual_drafter or "none"
        if kind != "none":
            drafter_def, drafter_name = random_drafter(preset, kind, dtype)
            format = models.quantize_drafter
            drafter_def = quantised_def(
                drafter_def, drafter_name, format, format, "quantize_drafter"
            )
        if (head := models.quantize_draft_head) is not None:
            check_borrows(drafter_def, head)
            assert drafter_def is not None
            drafter_def = model_def_with_head(drafter_def, target_def, head)
    else:
        model, drafter_model = load_models(models, read_weights=with_weights, vision=images)
        target_def, target_params = model.model_def, model.params
        target_name = f"{models.target or 'bundled'}{models.quantized}"
        if models.target is None:
            values = json.loads((BUNDLED / "held_out.json").read_text())
            held_out = tuple(tuple(p["ids"]) for p in values["prompts"])
        if drafter_model is not None:
            drafter_def, drafter_params = drafter_model.model_def, drafter_model.params
            drafter_name = models.drafter or "dflash"
    program_features = ProgramFeatures.wanted_by([sampling])
    spec = make_spec(model or target_def, drafter_def, drafting, program_features)
    if images and preset is not None and (vision := vision_presets().get(preset)) is not None:
        vision_def = quantised_def(
            model_def_of(vision, dtype), preset, models.quantize_vision, None, "quantize_vision"
        )
        spec = dataclasses.replace(spec, vision=vision_def)
    vision_params = None if model is None or model.vision is None else model.vision.params
    if positions > target_def.config.max_positions:
        raise UsageError(
            f"prompt or context and --new-tokens need {positions} positions; {target_name} has "
            f"{target_def.config.max_positions}"
        )
    devices = mesh or make_mesh(devices=jax.devices()[:1])
    if with_weights:
        memory.check_fits(spec, rows, bench_cache_length(spec, positions), devices)
    elif target_params is None:
        target_params = target_def.placed_shapes(devices)
    if target_params is None:
        target_params = _random_params(target_def, seed, mesh)
        if drafter_def is not None:
            drafter_params = _random_params(drafter_def, seed + 1, mesh)
    if with_weights and vision_params is None and spec.vision is not None:
        vision_params = _random_params(spec.vision, seed + 2, mesh)
    names = target_name, drafter_name
    return ModelPair(spec, target_params, drafter_params, *names, held_out, sampling, vision_params)


def vision_presets() -> dict[str, Any]:
    """Return the configs of the vision parts of released targets, by the targets' names."""
    return {name: x for family in families("vision") for name, x in family.presets.items()}


def check_rows(batch_sizes: Sequence[int], data: int) -> None:
    """Refuse batches that the data axis of the mesh does not divide, with UsageError."""
    wrong = [size for size in batch_sizes if size % data]
    if wrong:
        raise UsageError(
            f"--batch-size {wrong[0]} does not divide by data={data} of --mesh; give multiples of "
            f"{data}"
        )


def _random_params(model_def: ModelDef, seed: int, mesh: Mesh | None) -> Params:
    """Return random weights, adjusted by the family where random numbers do not behave."""
    params = model_def.random_params(
        seed, None if mesh is None else model_def.weight_shardings(mesh)
    )
    return family_of(model_def.config).randomise(params, seed)


def _loaded(model_def: ModelDef, params: Params, name: str) -> LoadedModel:
    return LoadedModel(model_def, params, model_def.config, None, Path(), name)
