"""The drafter of each kind that belongs to a target's preset, for random weights."""

from __future__ import annotations

import dataclasses

from jaxspec.configs.dflash import PRESETS as DFLASH_PRESETS
from jaxspec.configs.dflash import DFlashConfig, default_feature_layers
from jaxspec.configs.gemma4 import PRESETS as TARGET_PRESETS
from jaxspec.configs.mtp import PRESETS as MTP_PRESETS
from jaxspec.configs.mtp import MTPConfig
from jaxspec.drafters.dflash import DFlashDrafter
from jaxspec.drafters.mtp import MTPDrafter
from jaxspec.params import Graph
from jaxspec.state import DecodeSpec

DRAFTER_KINDS = ("mtp", "dflash")


def random_drafter(preset: str, kind: str, dtype: str) -> tuple[Graph, str]:
    """Return the drafter of a kind for a target preset, and what to call it."""
    if kind == "mtp":
        return Graph(MTPDrafter, MTP_PRESETS[preset], dtype), f"MTP of {preset}, random weights"
    config, name = drafter_config(preset)
    return Graph(DFlashDrafter, config, dtype), name


def drafter_kind(spec: DecodeSpec) -> str | None:
    """Return "mtp", "dflash", or None without a drafter."""
    return spec.drafter and ("mtp" if isinstance(spec.drafter.config, MTPConfig) else "dflash")


def drafter_config(preset: str) -> tuple[DFlashConfig, str]:
    """Return the DFlash drafter for a target preset and what to call it.

    There is no released drafter for E2B and E4B. Theirs is made by the proportions of the others.
    """
    if preset in DFLASH_PRESETS:
        return DFLASH_PRESETS[preset], f"DFlash as for {preset}, random weights"
    target = TARGET_PRESETS[preset]
    heads = max(8, 8 * round(1.5 * target.hidden_size / 128 / 8))
    config = dataclasses.replace(
        DFLASH_PRESETS["26b-a4b"],
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_heads=heads,
        intermediate_size=2 * target.hidden_size,
        feature_layers=default_feature_layers(target.num_layers, 6),
        num_target_layers=target.num_layers,
        max_positions=target.max_positions,
    )
    rule = (
        f"DFlash made up for {preset} (26b-a4b's, with the target's width, {heads} heads for 1.5 x width, "
        "MLP 2 x width, six even feature layers), random weights"
    )
    return config, rule
