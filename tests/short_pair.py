"""The bundled pair with two of the target's eight layers and one of the drafter's two, for what reads no text.

Programs of it compile in a fraction of the time. Drafts are still drafts of this target: they are only worse.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (numpy knows bfloat16 with it)
from safetensors.numpy import load_file, save_file

from jaxspec.api import BUNDLED

KEPT = (2, 3)  # a sliding layer and a full one, of the target and of the assistant
DRAFTS = 1  # the drafter's full layer


def write(directory: Path) -> Path:
    """Write a directory like `jaxspec.api.BUNDLED`."""
    shutil.copytree(BUNDLED, directory)
    for name, part in (("target", None), ("mtp", "text_config")):
        config = _config(directory / name)
        of = config if part is None else config[part]
        of["layer_types"] = [of["layer_types"][layer] for layer in KEPT]
        of["num_hidden_layers"] = len(KEPT)
        if of["num_kv_shared_layers"]:
            of["num_kv_shared_layers"] = len(KEPT)
        _write(directory / name, config, {f"layers.{old}.": new for new, old in enumerate(KEPT)})
    config = _config(directory / "dflash")
    config["dflash_config"]["target_layer_ids"] = [0]
    config["num_target_layers"] = len(KEPT)
    config["layer_types"], config["num_hidden_layers"] = [config["layer_types"][DRAFTS]], 1
    inputs = config["hidden_size"]
    _write(directory / "dflash", config, {f"layers.{DRAFTS}.": 0}, inputs=inputs)
    return directory


def _config(directory: Path) -> dict[str, Any]:
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config.pop("measured_acceptance", None)  # it is of other weights
    return config


def _write(directory: Path, config: dict[str, Any], kept: dict[str, int], inputs: int = 0) -> None:
    """Write the config, and the weights without the layers that are not kept."""
    file, tensors = directory / "model.safetensors", {}
    for name, x in load_file(file).items():
        layer = re.search(r"layers\.\d+\.", name)
        if layer:
            if layer[0] not in kept:
                continue
            name = name.replace(layer[0], f"layers.{kept[layer[0]]}.")
        if name == "fc.weight":  # of the features of one layer
            x = x[:, :inputs].copy()
        tensors[name] = x
    save_file(tensors, file)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
