"""Every key and every tensor of every layout of drafters, missing or changed: refused by name, or read.

`check` and people's own edits make such files. Nothing may be ignored but keys that are known to mean
nothing, and no error may be one of Python's own.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.headers import StoredTensor
from checkpoints_convert.hf_io import HFCheckpoint
from checkpoints_convert.quantised.view import open_view
from checkpoints_convert.rules import match
from jaxspec.configs.base import ConfigError
from jaxspec.registry import recognise
from jaxspec.weights.source import parameter_shapes, rule_set
from tests import tiny
from tests.checkpoints_convert import hf_layout
from tests.drafters import test_dflash2, test_dspark, test_speculators

Path_ = tuple[str, ...]

ZLAB = hf_layout.DRAFTERS["26b-a4b"]
CONFIGS: dict[str, dict[str, Any]] = {
    "dflash": ZLAB,
    "dflash-qwen3": hf_layout.DRAFTERS["qwen3-8b"],
    "dflash-speculators": test_speculators.CONFIG,
    **{f"dflash2-{name}": layout[0] for name, layout in test_dflash2.LAYOUTS.items()},
    **{f"dspark-{name}": layout.config for name, layout in test_dspark.LAYOUTS.items()},
}

HARMLESS = {
    *(
        "auto_map",
        "dtype",
        "has_no_defaults_at_init",
        "speculators_version",
        "transformers_version",
    ),
    *("attention_dropout", "initializer_range", "max_window_layers", "use_cache", "num_anchors"),
    *("ce_loss_alpha", "tie_word_embeddings", "use_sliding_window", "verifier", "model_type"),
    *("eos_token_id", "bos_token_id", "pad_token_id", "target_model_type"),
    *("target_text_model_type", "default_proposal_method"),
}
"""Keys without a meaning for drafts. Head and embedding are tied or not as the tensors are."""
NEARLY = {
    "architectures",  # keys say more than the name does
    "sliding_window",  # of layers that are all full
    "num_global_key_value_heads",  # of layers whose values are no keys
    "rope_scaling",  # an empty one is none
    "head_dim",  # of Gemma's sliding layers, where all are full
    "proposal_methods",  # all methods but one
    "speculators_config",  # it only repeats
}
"""Keys that mean nothing in some files."""
OTHER_NAMES = {
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "kv heads",
    "num_global_key_value_heads": "kv heads",
    "hidden_size_per_layer_input": "per_layer_input_size",
    "layer_types": "sliding_attention",
    "num_hidden_layers": "layer_types",
}
MISSING = object()


def paths(config: dict[str, Any], at: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Yield every key of a config.json and of the objects in it, with its value."""
    for key, value in config.items():
        yield (*at, key), value
        if isinstance(value, dict):
            yield from paths(value, (*at, key))


def with_value(config: dict[str, Any], path: Path_, value: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    inner = config
    for key in path[:-1]:
        inner = inner[key]
    inner.pop(path[-1])
    if value is not MISSING:
        inner[path[-1]] = value
    return config


def others(value: Any) -> Iterator[Any]:
    """Yield other values than this one: none, of other types, and close to it."""
    for other in (MISSING, None, "word", -1, 3.5, 10**9, True, [], [1], {}, {"a": 1}):
        if other is MISSING or type(other) is not type(value) or other != value:
            yield other
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield value + 1
    elif isinstance(value, list) and value:
        yield from (value[:-1], [*value, value[-1]])


@pytest.mark.parametrize("name", CONFIGS)
def test_every_key_is_read_or_refused_by_name(name: str) -> None:
    config = CONFIGS[name]
    family = recognise(config)
    read, refused = family.read(config, None), 0
    for path, value in paths(config):
        for other in others(value):
            changed = with_value(config, path, other)
            words = f"{'.'.join(path)} = {'missing' if other is MISSING else other!r}"
            try:
                same = recognise(changed).read(changed, None) == read
            except ConfigError as error:
                refused += 1
                named = [*path, OTHER_NAMES.get(path[-1], path[-1])]
                if not any(key in str(error) for key in named):
                    pytest.fail(f"{words}: {error}")
                continue
            # None and no value are the default, which may be the value that is there.
            is_default = other is None or other is MISSING
            meaningless = {*path} & (HARMLESS | NEARLY)
            assert not same or is_default or meaningless, f"{words} is ignored"
    assert refused > 100


SPECS: dict[str, tuple[dict[str, Any], dict[str, np.ndarray]]] = {
    "dflash-speculators": (
        test_speculators.CONFIG,
        test_speculators.tensors_of(test_speculators.CONFIG),
    ),
    **{
        f"dflash2-{name}": (
            layout[0],
            test_dflash2.tensors_of(layout[1], tables=name == "speculators"),
        )
        for name, layout in test_dflash2.LAYOUTS.items()
    },
    **{
        f"dspark-{name}": (layout.config, test_dspark.tensors_of(layout))
        for name, layout in test_dspark.LAYOUTS.items()
    },
}


ROLES = {"embed_tokens.weight": ["embedding"], "lm_head.weight": ["head"]}
"""Names of tensors that a drafter may do without, if the target's fit."""


def stored(array: np.ndarray) -> StoredTensor:
    dtype = {"float32": "F32", "int64": "I64", "bool": "BOOL"}[str(array.dtype)]
    return StoredTensor(dtype=dtype, shape=array.shape, file=Path("model.safetensors"), offset=0)


def matched(config: dict[str, Any], tensors: dict[str, StoredTensor]) -> None:
    """Match tensors with parameters, as loading does before it reads any."""
    family = recognise(config)
    read = family.fit_to(family.read(config, None), tensors)
    shapes = parameter_shapes(read)
    rules = rule_set(read, shapes)
    checkpoint = HFCheckpoint(Path("here"), config, None, tensors)
    view = open_view(checkpoint, rules, None, "here")
    match(rules, shapes, view.tensors, "here")


@pytest.mark.parametrize("name", SPECS)
def test_every_tensor_is_needed_and_has_its_shape(name: str) -> None:
    """One that is missing, one of another size, and one too many. Sizes of a vocabulary are such sizes."""
    config, arrays = SPECS[name]
    tensors = {key: stored(array) for key, array in arrays.items()}
    matched(config, tensors)
    for key, tensor in tensors.items():
        if key == "t2d":  # of training alone
            continue
        longer = dataclasses.replace(tensor, shape=(tensor.shape[0] + 1, *tensor.shape[1:]))
        flags = dataclasses.replace(tensor, dtype="BOOL")
        changes = {
            "missing": {k: t for k, t in tensors.items() if k != key},
            "longer": tensors | {key: longer},
            "of another dtype": tensors | {key: flags},
            "twice": tensors | {f"{key}.copy": tensor},
        }
        for words, changed in changes.items():
            try:
                matched(config, changed)
            except (CheckpointError, ConfigError) as error:
                message = str(error)
            else:  # without an embedding or a head of its own, a drafter uses the target's
                message = key if words == "missing" and key in ROLES else ""
            named = [key.rpartition(".")[0] or key, *ROLES.get(key, ())]
            assert any(name in message for name in named), f"{key} {words}: {message}"


@pytest.mark.parametrize("name", SPECS)
def test_drafters_of_other_targets_are_refused(name: str) -> None:
    """By the vocabulary, by the width of features and by the layers; a target that fits is not refused."""
    read = recognise(SPECS[name][0]).read(SPECS[name][0], None)
    target = tiny.config("31b")
    wide = read.feature_size
    layers = max(read.feature_layers) + 2
    layers = read.num_target_layers or layers
    fits = dataclasses.replace(
        target,
        vocab_size=read.vocab_size,
        hidden_size=wide,
        layer_types=("sliding",) * (layers - 1) + ("full",),
    )
    read.check_fits(fits)
    for field, value, words in (
        ("vocab_size", read.vocab_size + 1, "vocab_size"),
        ("hidden_size", wide + 8, "hidden_size"),
        ("layer_types", ("sliding", "full"), "layer"),
    ):
        with pytest.raises(ConfigError, match=words):
            read.check_fits(dataclasses.replace(fits, **{field: value}))
