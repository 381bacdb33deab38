"""Mutated configs: config.json and generation_config.json of every family, and manifests of ours.

A config that is accepted must make sense to `complaints`, which is written apart from our readers; must say what the
file says; and must survive a manifest.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints_convert.files import read_json
from jaxspec.configs.base import ConfigError, GenerationDefaults, from_json, to_json
from jaxspec.configs.known_keys import KIND_OF
from jaxspec.registry import recognise
from jaxspec.weights.loading import CheckpointError
from jaxspec.weights.manifest import Manifest
from jaxspec.weights.source import open_hf_source, read_configs
from tests import tiny_qwen3
from tests.checkpoints_convert import hf_layout
from tests.checkpoints_convert.hf_layout import (
    ASSISTANTS,
    DRAFTERS,
    RELEASED,
    TINY,
    TINY_ASSISTANTS,
)
from tests.configs.test_configs import as_transformers_saves
from tests.drafters import test_dflash2, test_dspark, test_speculators
from tests.tools.fuzzing import mutate
from tests.tools.fuzzing.outcomes import Case, Fault, Outcome, judge
from tests.weights.test_qwen3 import GENERATION as QWEN3_GENERATION
from tests.weights.test_qwen3 import released as qwen3_released
from tests.weights.test_qwen3 import shapes_of as qwen3_shapes

DOCUMENTED = (CheckpointError, ConfigError)
TARGET_GENERATION = {
    "do_sample": True,
    "eos_token_id": [1, 6],
    "suppress_tokens": [3, 4],
    "temperature": 1.0,
    "top_k": 64,
    "top_p": 0.95,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
EITHER = ("eos_token_id", "causal", "is_causal", "rope_theta")  # of either type
EITHER += tuple(key for key, kind in KIND_OF.items() if kind == "a number")
NO_FIELDS = (  # read, but of no field of a config; or 0 says what the file would say without it
    *("model_type", "architectures", "source", "revision", "skipped"),
    *("num_kv_shared_layers", "num_window_keys", "bos_token_id", "pad_token_id", *KIND_OF),
    # checked in models without the feature, too
    *("moe_intermediate_size", "num_experts", "num_global_key_value_heads", "top_k_experts"),
    *("global_head_dim", "vocab_size_per_layer_input", "num_centroids", "sliding_window"),
    *("centroid_intermediate_top_k", "partial_rotary_factor"),
)
ALIASES = {  # what a message may call a key
    "num_hidden_layers": ("layer_types",),
    "num_attention_heads": ("num_heads",),
    "num_key_value_heads": ("kv heads", "per_layer_config"),
    "num_global_key_value_heads": ("kv heads",),
    "top_k_experts": ("num_experts_per_token",),
    "target_layer_ids": ("feature layers", "feature_layers"),
    "num_target_layers": ("feature layers", "feature_layers"),
    "architectures": ("model_type", "Qwen3"),
    "attention_k_eq_v": ("num_global_key_value_heads",),
    "layer_types": ("sliding_window", "layers"),
    "enable_moe_block": ("num_experts",),
    "use_ordered_embeddings": ("centroids",),
    "text_config": ("vocab_size",),
    "num_kv_heads": ("kv heads",),
    "centroid_intermediate_top_k": ("num_top_centroids",),
    "vocab_size": ("vocabulary",),
}


@dataclass(frozen=True)
class Base:
    """A good directory, and the file of it that is mutated.

    Attributes:
      document: what that file holds.
      weights: whether it has tensors, which then have to fit the config.
      read: the places of the document that are read.
    """

    directory: Path
    file: str
    document: Any
    weights: bool
    read: frozenset[mutate.Path]
    config: Any
    generation: GenerationDefaults | None


def fuzz(directory: Path, count: int, seed: int = 0) -> Iterator[Case]:
    """Yield the outcomes of so many mutated configs."""
    bases = list(_bases(directory))
    for i in range(count):
        rng = random.Random(f"configs {seed} {i}")
        yield _case(bases[i % len(bases)], mutate_of(rng, bases[i % len(bases)]), i)


def mutate_of(rng: random.Random, base: Base) -> mutate.Mutation:
    return mutate.mutated(rng, base.document, base.read)


def _case(base: Base, mutation: mutate.Mutation, number: int) -> Case:
    file = base.directory / base.file
    good = file.read_bytes()
    what = f"{number} {base.directory.name}/{base.file}: {mutation.words}"
    places = (str(base.directory), base.file)
    names = [str(part) for part in mutation.path if isinstance(part, str)]
    names = names if mutation.kind == "gone" else names[-2:]
    names = [n for name in names for n in (name, *ALIASES.get(name, ()))] or [base.file]
    names.append("nested too deeply")
    if not mutation.path or mutation.kind == "text":
        names += [base.file, "has no", "has model_type"]
    if mutation.text == mutate.LFS.encode():
        names = ["Git LFS"]
    if mutation.path and isinstance(base_value(base, mutation.path), dict):
        names += list(base_value(base, mutation.path))  # what is missing in it
    if base.weights:
        names.append("does not fit its config.json")
    if base.file == "manifest.json" and mutation.path[:1] == ("kind",):
        names.append("family")

    def run() -> None:
        file.write_bytes(mutation.text)
        try:
            config, generation = read(base)
        finally:
            file.write_bytes(good)
        check(base, mutation, config, generation)

    return judge(what, run, documented=DOCUMENTED, names=names, places=places)


def base_value(base: Base, path: mutate.Path) -> Any:
    try:
        return mutate.lookup(base.document, path)
    except (KeyError, IndexError, TypeError):
        return None


def read(base: Base) -> tuple[Any, GenerationDefaults | None]:
    """Read a directory as loading does."""
    if base.file == "manifest.json":
        manifest = Manifest.read(base.directory)
        return manifest.config, manifest.generation
    if base.weights:
        source = open_hf_source(base.directory)
        return source.config, source.generation
    values = read_json(base.directory / "config.json")
    file = base.directory / "generation_config.json"
    more = read_json(file) if file.is_file() else None
    _, config, generation = read_configs(base.directory, values, more)
    return config, generation


def check(
    base: Base, mutation: mutate.Mutation, config: Any, generation: GenerationDefaults | None
) -> None:
    """Raise `Fault` if an accepted config is wrong."""
    wrong = [*complaints(config)]
    if generation is not None:
        wrong += ids_of(generation, config.vocab_size)
        wrong += sampling_of(generation)
    if wrong:
        raise Fault(Outcome.NONSENSE, "; ".join(wrong)[:300])
    if mutation.kind == "text":
        raise Fault(Outcome.NONSENSE, "the text is no such document")
    is_read = mutation.path in base.read
    if mutation.kind == "type" and is_read and mutation.path[-1] not in EITHER:
        raise Fault(Outcome.NONSENSE, "a value of another type")
    for made, kind in ((config, type(config)), (generation, GenerationDefaults)):
        if made is not None and from_json(kind, json.loads(json.dumps(to_json(made)))) != made:
            raise Fault(Outcome.MISREAD, "it does not survive a manifest")
    value = mutation.value
    if isinstance(value, int | float | str) and mutation.kind == "value" and value is not True:
        changes = {**changed(base.config, config), **changed(base.generation, generation)}
        old = base_value(base, mutation.path)
        same = old == mutation.value
        if is_read and not same and not changes and not set(NO_FIELDS) & set(mutation.path):
            raise Fault(Outcome.MISREAD, "it was read and changes nothing")
        scalars = {k: v for k, v in changes.items() if not isinstance(v, tuple | bool)}
        if scalars and not any(
            v in (mutation.value, _float(mutation.value)) for v in scalars.values()
        ):
            raise Fault(Outcome.MISREAD, f"it was read as {scalars}")


def _float(value: Any) -> Any:
    return float(value) if isinstance(value, int) and abs(value) < 1e300 else value


def changed(before: Any, after: Any) -> dict[str, Any]:
    if before is None or after is None:
        return {} if before is after else {"all": after}
    return {
        f.name: getattr(after, f.name)
        for f in dataclasses.fields(before)
        if getattr(before, f.name) != getattr(after, f.name)
    }


# --- what makes sense ----------------------------------------------------------------------------


MAY_BE_ZERO = {
    *("num_kv_shared_layers", "per_layer_input_size", "per_layer_vocab_size", "num_experts"),
    *("num_experts_per_token", "expert_intermediate_size", "num_centroids", "num_top_centroids"),
    *("mask_token_id", "markov_rank"),
}
FLAGS = {
    *("k_eq_v", "double_wide_mlp", "tied_head", "scale_embeddings", "own_embedding", "own_head"),
    *("sample_from_anchor", "window_from_anchor", "confidence", "confidence_with_markov"),
    "gemma_layers",
}
MAY_BE_NONE = {
    *("final_logit_softcap", "sliding_window", "num_target_layers", "draft_vocab_size"),
    "target_hidden_size",
}
FLOATS = {
    "rms_norm_eps": (1e-30, 1),
    "rope_theta": (1, 1e20),
    "full_rope_theta": (1, 1e20),
    "full_partial_rotary_factor": (1e-9, 1),
    "full_rope_factor": (1e-3, 1e6),
    "rope_factor": (1e-3, 1e6),
    "rotary_factor": (1e-9, 1),
    "input_embedding_scale": (1e-3, 1e6),
    "output_multiplier": (1e-3, 1e6),
    "final_logit_softcap": (1e-3, 1e20),
}


def complaints(c: Any) -> Iterator[str]:
    """Yield what makes no sense in a config."""
    for field in dataclasses.fields(c):
        name, value = field.name, getattr(c, field.name)
        if value is None and name in MAY_BE_NONE:
            continue
        if name in FLAGS:
            if type(value) is not bool:
                yield f"{name} is {value!r}"
        elif name in FLOATS:
            low, high = FLOATS[name]
            if type(value) not in (int, float) or not low <= value <= high:
                yield f"{name} is {value!r}"
        elif name == "layer_types":
            if not 1 <= len(value) <= 10_000 or not set(value) <= {"sliding", "full"}:
                yield f"layer_types is {str(value)[:50]}"
        elif name == "causal":
            if len(value) != len(c.layer_types) or {type(x) for x in value} != {bool}:
                yield f"causal is {str(value)[:50]}"
        elif name == "feature_layers":
            if not value or any(type(i) is not int or i < 0 for i in value):
                yield f"feature_layers is {str(value)[:50]}"
            elif c.num_target_layers and max(value) > c.num_target_layers - 2:
                yield "feature_layers beyond the target"
        elif name == "suppress_tokens":
            yield from ids_of(c, c.vocab_size)
        elif name == "container":
            if value not in ("z-lab", "speculators", "DeepSpec", "ModelOpt"):
                yield f"container is {value!r}"
        elif name == "markov_head_type":
            if value not in ("vanilla", "gated", "rnn"):
                yield f"markov_head_type is {value!r}"
        elif name == "query_position":
            if value not in ("last", "next"):
                yield f"query_position is {value!r}"
        elif type(value) is not int or not (name not in MAY_BE_ZERO) <= value < 2**31:
            yield f"{name} is {value!r}"
    yield from relations(c)


def relations(c: Any) -> Iterator[str]:
    try:
        for heads in ("num_kv_heads", "full_num_kv_heads"):
            if hasattr(c, heads) and c.num_heads % getattr(c, heads):
                yield f"{heads} do not divide"
        for size in ("head_dim", "full_head_dim"):
            if hasattr(c, size) and getattr(c, size) % 2:
                yield f"{size} is odd"
        if getattr(c, "mask_token_id", 0) >= c.vocab_size:
            yield "mask_token_id outside the vocabulary"
        if getattr(c, "num_experts", 0) and (
            not 1 <= c.num_experts_per_token <= c.num_experts or c.expert_intermediate_size < 1
        ):
            yield "experts do not fit"
        if getattr(c, "per_layer_input_size", 0) and c.per_layer_vocab_size < 1:
            yield "per-layer inputs without a vocabulary"
        if c.num_layers > 10_000:
            yield f"{c.num_layers} layers"
        elif hasattr(c, "layers"):
            assert len(c.layers) == c.num_layers
    except Exception as error:
        yield f"{type(error).__name__}: {error}"


def ids_of(c: Any, vocab: int) -> Iterator[str]:
    for name in ("eos_token_ids", "suppress_tokens"):
        for i in getattr(c, name, ()):
            if type(i) is not int or not 0 <= i < vocab:
                yield f"{name} has {str(i)[:30]}"


def sampling_of(g: GenerationDefaults) -> Iterator[str]:
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        value = getattr(g, name)
        most = 1 if name in ("top_p", "min_p") else 2**31 if name == "top_k" else math.inf
        if type(value) not in (int, float) or not 0 <= value <= most or value == math.inf:
            yield f"{name} is {mutate.shown(value)}"
    if type(g.top_k) is not int:
        yield f"top_k is {g.top_k!r}"


# --- good directories ----------------------------------------------------------------------------


def _bases(directory: Path) -> Iterator[Base]:
    small = TINY["31b"]
    tied = tiny_qwen3.hf_config("qwen3-tied")
    saved = as_transformers_saves(RELEASED["31b"])
    targets: list[tuple[str, dict[str, Any], hf_layout.Shapes | None, dict[str, Any]]] = [
        ("e2b", TINY["e2b"], hf_layout.target_shapes(TINY["e2b"]), TARGET_GENERATION),
        ("moe", TINY["26b-a4b"], hf_layout.target_shapes(TINY["26b-a4b"]), TARGET_GENERATION),
        ("31b", small, hf_layout.target_shapes(small), TARGET_GENERATION),
        ("saved", saved, None, TARGET_GENERATION),
        ("released", hf_layout.multimodal(RELEASED["12b"]), None, TARGET_GENERATION),
        ("qwen3", tied, qwen3_shapes(tied), TARGET_GENERATION),
        ("qwen3-8b", qwen3_released("qwen3-8b"), None, QWEN3_GENERATION),
    ]
    gemma = {k: v for k, v in test_dspark.GEMMA.items() if k != "head_dim"}  # of sliding layers
    gemma["num_key_value_heads"] = gemma["num_global_key_value_heads"]
    drafter, assistant = hf_layout.TINY_DRAFTER, TINY_ASSISTANTS["e2b"]
    drafting = {"num_assistant_tokens": 4, "suppress_tokens": [5, 7]}
    drafters: list[tuple[str, dict[str, Any], hf_layout.Shapes | None, dict[str, Any]]] = [
        ("dflash", drafter, hf_layout.drafter_shapes(drafter), {}),
        ("z-lab", DRAFTERS["qwen3-8b"], None, {}),
        ("mtp", assistant, hf_layout.assistant_shapes(assistant), drafting),
        ("mtp-12b", ASSISTANTS["12b"], None, drafting),
        ("speculators", test_speculators.CONFIG, None, {}),
        ("dflash2", test_dflash2.ZLAB, None, {}),
        ("speculators-dflash2", test_dflash2.SPECULATORS, None, {}),
        ("speculators-dspark", test_dspark.SPECULATORS, None, {}),
        ("specforge", test_dspark.SPECFORGE, None, {}),
        ("modelopt", test_dspark.MODELOPT, None, {}),
        ("deepspec", test_dspark.DEEPSPEC, None, {}),
        ("deepspec-gemma", gemma, None, {}),
    ]
    for name, config, shapes, generation in (*targets, *drafters):
        path = directory / name
        if shapes is None:
            path.mkdir(parents=True)
            (path / "config.json").write_text(json.dumps(config))
        else:
            hf_layout.write(path, config, shapes)
        if generation:
            (path / "generation_config.json").write_text(json.dumps(generation))
        yield _base(path, "config.json", config, generation, shapes is not None)
        if name in ("31b", "mtp", "qwen3-8b"):
            yield _base(path, "generation_config.json", config, generation, shapes is not None)
        if name in ("moe", "qwen3", "dflash", "mtp"):
            yield _manifest(directory / f"ours-{name}", path)


def _base(
    path: Path, file: str, config: dict[str, Any], generation: dict[str, Any], weights: bool
) -> Base:
    seen: set[mutate.Path] = set()
    is_config = file == "config.json"
    document = config if is_config else generation
    values = Recorder(config, seen) if is_config else config
    more = generation if is_config else Recorder(generation, seen)
    family = recognise(values)
    made = family.read(values, more or None)
    defaults = GenerationDefaults.from_hf(more or None, values) if family.role == "target" else None
    return Base(path, file, document, weights, frozenset(seen), made, defaults)


def _manifest(path: Path, source: Path) -> Base:
    path.mkdir()
    opened = open_hf_source(source)
    Manifest(
        kind=opened.family.name,
        config=opened.config,
        generation=opened.generation,
        source=str(source),
        revision=None,
        dtype="bfloat16",
        tensors=dict.fromkeys(list(opened.checkpoint.tensors)[:5], "BF16"),
        skipped=["a", "b"],
    ).write(path)
    document = json.loads((path / "manifest.json").read_text())
    seen = frozenset(p for p in mutate.paths(document) if p[0] != "jaxspec_version")
    return Base(path, "manifest.json", document, False, seen, opened.config, opened.generation)


class Recorder(dict[str, Any]):
    """A JSON object that notes which places of it are read."""

    def __init__(self, values: dict[str, Any], seen: set[mutate.Path], at: mutate.Path = ()):
        super().__init__(values)
        self.seen, self.at = seen, at

    def __getitem__(self, key: str) -> Any:
        return self._noted(key, super().__getitem__(key))

    def get(self, key: str, default: Any = None) -> Any:
        return self._noted(key, super().get(key, default))

    def __contains__(self, key: object) -> bool:
        self._noted(str(key), None)
        return super().__contains__(key)

    def items(self) -> Any:
        return [(key, self[key]) for key in self]

    def _noted(self, key: str, value: Any) -> Any:
        here = (*self.at, key)
        if dict.__contains__(self, key):
            self.seen.add(here)
        if isinstance(value, dict):
            return Recorder(value, self.seen, here)
        if isinstance(value, list):
            self.seen.update((*here, i) for i in range(len(value)))
        return value
