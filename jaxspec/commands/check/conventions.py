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
from jaxspec.configs.base import ConfigError, find_key
from jaxspec.configs.dflash import KEYS as DFLASH_KEYS
from jaxspec.configs.dflash import DFlashConfig
from jaxspec.configs.mtp import KEYS as MTP_KEYS
from jaxspec.configs.mtp import MTPConfig
from jaxspec.params import Graph
from jaxspec.shapes import Params

_METHOD = "the method: no key changes it"


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

    @property
    def key(self) -> tuple[Graph, int]:
        """What tells it from others, as long as they live."""
        return self.graph, id(self.params)


class Origins:
    """Where the values of a loaded config come from: its config.json, a default, or our own manifest."""

    def __init__(self, model: LoadedModel, keys: Mapping[str, Sequence[str]]):
        """Read the file that the model was loaded from.

        Args:
          keys: by field, where config.json may hold it.
        """
        self.directory, self.keys = model.directory, keys
        self.converted = (model.directory / MANIFEST).is_file()
        self.file = MANIFEST if self.converted else "config.json"
        self.values = {} if self.converted else read_json(model.directory / "config.json")

    def of(self, field: str, default: str) -> str:
        """Say what set a field; `default` is what holds where the file is silent."""
        if self.converted:
            return f"{MANIFEST}: config.{field}"
        key, _ = find_key(self.values, self.keys[field])
        return f"default: {default}" if key is None else f"config.json: {key}"

    def fix(self, field: str, value: Any) -> str:
        """Say how to set a field."""
        key = f"config.{field}"
        if not self.converted:
            key = find_key(self.values, self.keys[field])[0] or self.keys[field][0]
        return f"set {key} to {json.dumps(value)} in {self.directory / self.file}"


def in_force(target: LoadedModel, drafter: LoadedModel) -> list[Convention]:
    """List every disputed convention of a pair."""
    config = drafter.config
    if isinstance(config, DFlashConfig):
        return [*_dflash(target, drafter, config), _suppressed(target)]
    assert isinstance(config, MTPConfig)
    return [*_mtp(target, drafter, config), _suppressed(target)]


def alternatives(
    drafter: LoadedModel, reading: Reading, longest_row: int
) -> tuple[list[Reading], list[str]]:
    """Return the readings that differ from this one in one convention.

    Args:
      longest_row: tokens of the longest text they will be compared on.

    Returns:
      The readings, and why others are left out.
    """
    config = reading.graph.config
    dflash = isinstance(config, DFlashConfig)
    origins = Origins(drafter, DFLASH_KEYS if dflash else MTP_KEYS)
    readings, left_out = [], []
    for name, field, value in _dflash_changes(config) if dflash else _mtp_changes(config):
        if field == "num_window_keys" and longest_row <= config.sliding_window:
            window = config.sliding_window
            left_out.append(f"{name}: no row is longer than the window of {window} tokens")
            continue
        try:
            changed = dataclasses.replace(config, **{field: value})
        except ConfigError as error:
            left_out.append(f"{name}: {error}")
            continue
        graph = dataclasses.replace(reading.graph, config=changed)
        readings.append(Reading(name, field, origins.fix(field, value), graph, reading.params))
    if not dflash and reading.params is drafter.params:
        readings += _mtp_inputs(drafter, reading)
    return readings, left_out


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
    yield Convention("positions", "n", shown, _METHOD)


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


# --- MTP assistants ----------------------------------------------------------------------------------


def _mtp(target: LoadedModel, drafter: LoadedModel, c: MTPConfig) -> Iterator[Convention]:
    origins = Origins(drafter, MTP_KEYS)
    owners = {kind: target.config.last_kv_owner(kind) for kind in sorted(set(c.layer_types))}
    shown = ", ".join(f"{layer} ({kind})" for kind, layer in owners.items())
    yield Convention("K/V of layers", owners, shown, "target's config: the last of a kind with K/V")
    shown = f"{'n - 1' if c.query_position == 'last' else 'n'}, frozen (n: committed tokens)"
    origin = origins.of("query_position", "last")
    yield Convention("query position", c.query_position, shown, origin)
    shown = f"the last {c.num_window_keys} committed keys on sliding layers"
    origin = origins.of("num_window_keys", "as many as sliding_window")
    yield Convention("window", c.num_window_keys, shown, origin)
    order = "[embedding, state]; state: after the final norm"
    yield Convention("inputs", ["embedding", "state"], order, _METHOD)
    yield Convention("embedding scale", True, _scale_shown(target, True), _METHOD)
    yield Convention("logit soft cap", None, "none", "the method: others are refused")
    shown = "none: it reads no masks, and its layers no drafts"
    yield Convention("mask id, causality", None, shown, _METHOD)
    shown = "dense"
    if c.num_centroids:
        shown = f"best {c.num_top_centroids} of {c.num_centroids} centroids"
    yield Convention("head", c.num_top_centroids or None, shown, f"assistant's {origins.file}")
    if c.suppress_tokens:
        yield Convention(
            "suppressed in drafts",
            list(c.suppress_tokens),
            ", ".join(map(str, c.suppress_tokens)),
            f"assistant's {MANIFEST if origins.converted else 'generation_config.json'}: suppress_tokens",
        )


def _mtp_changes(c: MTPConfig) -> Iterator[tuple[str, str, Any]]:
    if c.query_position == "last":
        yield "query position n", "query_position", "next"
    else:
        yield "query position n - 1", "query_position", "last"
    w = c.sliding_window
    keys = w + 1 if c.num_window_keys == w else w
    yield f"window of {keys} keys", "num_window_keys", keys


def _mtp_inputs(drafter: LoadedModel, reading: Reading) -> Iterator[Reading]:
    """Yield what else the two inputs may have been: a linear layer takes their order and scale in itself."""
    weight = reading.params["pre_projection"]
    backbone = weight.shape[0] // 2
    embedding, state = weight[:backbone], weight[backbone:]
    scale = jnp.asarray(math.sqrt(backbone), weight.dtype)
    where = f"pre_projection in the weights of {drafter.directory}"
    for name, rows, fix in (
        ("inputs swapped: [state, embedding]", (state, embedding), f"swap the halves of {where}"),
        (
            "embeddings not scaled",
            (embedding / scale, state),
            f"divide the embedding's half of {where} by {float(scale):.5g}",
        ),
    ):
        params = {**reading.params, "pre_projection": jnp.concatenate(rows)}
        yield Reading(name, "pre_projection", fix, reading.graph, params)
