"""What a drafter takes for granted about its target: the conventions in force, and others as plausible.

Projects disagree on these, and a drafter that is run by another one than it was trained with still runs:
its drafts are just never accepted. Read `in_force`, then `alternatives`; `check` measures one against the other.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxspec.checkpoint import MANIFEST, LoadedModel, read_json
from jaxspec.config import DFLASH_KEYS, ConfigError, DFlashConfig, find_key
from jaxspec.params import Graph
from jaxspec.shapes import Params


@dataclass(frozen=True)
class Convention:
    """One convention in force: its value, in JSON and in words, and what set it."""

    name: str
    value: Any
    shown: str
    origin: str


@dataclass(frozen=True)
class Reading:
    """A drafter's weights under some set of conventions.

    Attributes:
      name: how it differs from the reading it was derived from.
      field: the convention that differs.
      fix: what to change, and in which file, for it to be in force.
    """

    name: str
    field: str
    fix: str
    graph: Graph
    params: Params


class Origins:
    """Where the values of a loaded config come from: its config.json, a default, or our own manifest."""

    def __init__(self, model: LoadedModel, keys: Mapping[str, Sequence[str]]):
        """Read the file that the model was loaded from.

        Args:
          keys: by field, where config.json may hold it.
        """
        self.directory, self.keys = model.directory, keys
        self.converted = (model.directory / MANIFEST).is_file()
        self.values = {} if self.converted else read_json(model.directory / "config.json")

    def of(self, field: str, default: str) -> str:
        """Say what set a field; `default` is what holds where the file is silent."""
        if self.converted:
            return f"{MANIFEST}: config.{field}"
        key, _ = find_key(self.values, self.keys[field])
        return f"default: {default}" if key is None else f"config.json: {key}"

    def fix(self, field: str, value: Any) -> str:
        """Say how to set a field."""
        file, key = MANIFEST, f"config.{field}"
        if not self.converted:
            file, key = "config.json", find_key(self.values, self.keys[field])[0]
            key = key or self.keys[field][0]
        return f"set {key} to {json.dumps(value)} in {self.directory / file}"


def in_force(target: LoadedModel, drafter: LoadedModel) -> list[Convention]:
    """List every disputed convention of a pair."""
    assert isinstance(drafter.config, DFlashConfig)
    return [*_dflash(target, drafter, drafter.config), _suppressed(target)]


def alternatives(drafter: LoadedModel, reading: Reading) -> tuple[list[Reading], list[str]]:
    """Return the readings that differ from this one in one convention, and what made others impossible."""
    config = reading.graph.config
    assert isinstance(config, DFlashConfig)
    origins = Origins(drafter, DFLASH_KEYS)
    readings, impossible = [], []
    for name, field, value in _dflash_changes(config):
        try:
            changed = dataclasses.replace(config, **{field: value})
        except ConfigError as error:
            impossible.append(f"{name}: {error}")
            continue
        graph = dataclasses.replace(reading.graph, config=changed)
        readings.append(Reading(name, field, origins.fix(field, value), graph, reading.params))
    return readings, impossible


def _suppressed(target: LoadedModel) -> Convention:
    ids = list(target.generation.suppress_tokens) if target.generation else []
    origin = "default: none"
    if (target.directory / MANIFEST).is_file():
        origin = f"target's {MANIFEST}: generation.suppress_tokens"
    elif ids:
        origin = "target's generation_config.json: suppress_tokens"
    return Convention("suppressed ids", ids, ", ".join(map(str, ids)) or "none", origin)


def _scale_shown(target: LoadedModel, scaled: bool) -> str:
    factor = jnp.asarray(math.sqrt(target.config.hidden_size), jnp.dtype(target.graph.dtype))
    return f"x {float(factor):.5g}" if scaled else "off"


# --- DFlash ------------------------------------------------------------------------------------------


def _dflash(target: LoadedModel, drafter: LoadedModel, c: DFlashConfig) -> Iterator[Convention]:
    origins = Origins(drafter, DFLASH_KEYS)

    def convention(name: str, field: str, shown: str, default: str) -> Convention:
        return Convention(name, getattr(c, field), shown, origins.of(field, default))

    yield convention(
        "feature layers",
        "feature_layers",
        f"outputs of {', '.join(map(str, c.feature_layers))} of 0-{c.num_target_layers - 1}",
        "evenly spaced",
    )
    layers = (
        f"{i} {kind} {'causal' if causal else 'bidirectional'}"
        for i, (kind, causal) in enumerate(zip(c.layer_types, c.causal, strict=True))
    )
    yield convention(
        "inside the block", "causal", ", ".join(layers), "sliding layers causal, full ones not"
    )
    yield convention(
        "embedding scale", "scale_embeddings", _scale_shown(target, c.scale_embeddings), "scaled"
    )
    yield convention(
        "logit soft cap",
        "final_logit_softcap",
        "none" if c.final_logit_softcap is None else f"{c.final_logit_softcap:g}",
        "none",
    )
    if "sliding" in c.layer_types:
        shown = f"{c.sliding_window} keys on sliding layers, the query's own included"
        yield convention("window", "sliding_window", shown, "none")
    yield convention("mask id", "mask_token_id", str(c.mask_token_id), "none")
    shown = f"{c.block_size}: anchor + {c.block_size - 1} drafts"
    yield convention("block size", "block_size", shown, "none")
    shown = "anchor at n, masks from n + 1 (n: committed tokens)"
    yield Convention("positions", "n", shown, "the method: no key changes it")


def _dflash_changes(c: DFlashConfig) -> Iterator[tuple[str, str, Any]]:
    """Yield names, fields and values of what may have been meant instead."""
    for offset, name in ((-1, "lower"), (1, "higher")):
        layers = [i + offset for i in c.feature_layers]
        yield f"feature layers one {name}", "feature_layers", tuple(layers)
    name = "embeddings not scaled" if c.scale_embeddings else "embeddings scaled"
    yield name, "scale_embeddings", not c.scale_embeddings
    seen = {c.causal}
    for name, causal in (
        ("sliding layers causal, full ones not", tuple(k == "sliding" for k in c.layer_types)),
        ("all layers causal", (True,) * c.num_layers),
        ("no layer causal", (False,) * c.num_layers),
    ):
        if causal not in seen:
            seen.add(causal)
            yield name, "causal", causal
