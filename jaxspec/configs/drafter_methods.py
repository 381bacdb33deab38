"""The methods of drafters, and how a config.json shows them. jaxspec does not run all of them.

Many files have the architecture or the model type of another method or of a target. Read `method_of`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from jaxspec.configs.fields import WORDS, ConfigError, object_of, read, words_of

_WORDS = {
    "dflare": "DFlare",
    "dflash": "DFlash",
    "dflash2": "DFlash2",
    "domino": "Domino",
    "dspark": "DSpark",
    "dspine": "DSpine",
    "eagle": "EAGLE",
    "eagle3": "EAGLE-3",
    "lilicorr": "LiLiCorr",
    "peagle": "P-EAGLE",
    "xpress": "XPress",
}
"""Methods by the words of `speculators_model_type` and `projector_type`."""

_KEYS = {
    "dflare_": "DFlare",
    "domino_": "Domino",
    "dspine_config": "DSpine",
    "lilicorr_": "LiLiCorr",
    "xpress_": "XPress",
    "conv_kernel_size": "DFlash2",
    "selector_rank": "DFlash2",
    "markov_rank": "DSpark",
}
"""Methods by how a key of theirs begins."""

_ARCHITECTURES = {
    "DFlare": "DFlare",
    "DFlash2": "DFlash2",
    "DSpark": "DSpark",
    "DSpine": "DSpine",
    "Domino": "Domino",
    "Eagle3": "EAGLE-3",
    "LiLiCorr": "LiLiCorr",
    "XPress": "XPress",
}
"""Methods by a part of the name of an architecture."""

_OBJECTS = ("dflash_config", "dflash_architecture_config")


def method_of(config: Mapping[str, Any], known: Collection[str]) -> str | None:
    """Return the method of a drafter's config.json; None if nothing shows one.

    Args:
      known: the methods that jaxspec runs.

    Raises:
      ConfigError: it is of another method. The message names it, and the key that shows it.
    """
    if (of_method := _method_of(config)) is None:
        return None
    method, sign = of_method
    if method in known:
        return method
    raise ConfigError(
        f"config.json is of a {method} drafter ({sign}), which jaxspec does not run. It drafts "
        f"with {', '.join(sorted(known))} and with Gemma 4's MTP assistants: take such a drafter "
        "of this target, or none"
    )


def _method_of(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the name of a method, and the key or the word that shows it."""
    of_container = read(config, "speculators_model_type", WORDS, None)
    parts = {"": config, **{f"{name}.": object_of(config, name) for name in _OBJECTS}}
    for where, part in parts.items():
        word: str = read(part, "projector_type", WORDS, "")
        if (method := _WORDS.get(word, "DFlash")) != "DFlash":
            return method, f"{where}projector_type {word}"
        for begin, method in _KEYS.items():
            key = next((k for k, v in part.items() if k.startswith(begin) and v is not None), None)
            if key is not None:
                return method, f"{where}{key}"
    if of_container is not None:
        return _WORDS.get(
            str(of_container), str(of_container)
        ), f"speculators_model_type {of_container}"
    for name in words_of(config, "architectures"):
        method = next((m for mark, m in _ARCHITECTURES.items() if mark in name), None)
        if method is not None:
            return method, f"architecture {name}"
    if config.get("dflash_config") is not None:  # of people who took the architecture out
        return "DFlash", "dflash_config"
    return None
