"""A tiny target and its drafters on disk, with a tokenizer of Gemma's kind. Their weights are random."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from jaxspec.configs.base import GenerationDefaults
from jaxspec.configs.dflash import DFlashConfig
from jaxspec.configs.gemma4 import Gemma4Config
from jaxspec.configs.mtp import MTPConfig
from jaxspec.registry import ModelConfig, family_of
from jaxspec.weights.arrays import LazyArray, save_params
from jaxspec.weights.define import model_def_of
from jaxspec.weights.manifest import Manifest
from tests.tiny import random_params

BOS, EOS, TURN = 2, 1, 5
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<turn>"]
WORDS = ["▁", "a", "b", "c", "▁a", "▁b", "ab", "\n", "é", "▁the"]
VOCAB = {t: i for i, t in enumerate([*SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), *WORDS])}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<turn>{{ m.role[0] }}{{ m.content }}{% endfor %}"
    "{% if enable_thinking %} the{% endif %}{% if add_generation_prompt %}<turn>m{% endif %}"
)

TARGET = Gemma4Config(
    vocab_size=len(VOCAB),
    hidden_size=32,
    layer_types=("sliding", "full", "full"),
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    full_num_kv_heads=1,
    full_head_dim=16,
    intermediate_size=32,
    sliding_window=16,
    max_positions=300,
    k_eq_v=True,
)
DRAFTER = DFlashConfig(
    vocab_size=len(VOCAB),
    hidden_size=32,
    layer_types=("sliding", "full"),
    causal=(True, False),
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=32,
    block_size=4,
    mask_token_id=4,
    feature_layers=(0, 1),
    num_target_layers=3,
    max_positions=300,
    sliding_window=16,
)
ASSISTANT = MTPConfig(
    vocab_size=len(VOCAB),
    hidden_size=16,
    backbone_hidden_size=32,
    layer_types=("sliding", "full"),
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    full_num_kv_heads=1,
    full_head_dim=16,
    intermediate_size=32,
    sliding_window=16,
    max_positions=300,
)
GENERATION = GenerationDefaults(
    eos_token_ids=(EOS,), temperature=1.5, top_k=7, top_p=0.9, min_p=0.01, repetition_penalty=1.1
)


def backend(*, bos: bool = True) -> tokenizers.Tokenizer:
    """Return a tokenizer of Gemma's kind: spaces as ▁, raw bytes for what is not in the vocabulary."""
    made = tokenizers.Tokenizer(
        models.BPE(
            VOCAB,
            [("▁", "a"), ("▁", "b"), ("a", "b")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    made.add_special_tokens(SPECIAL)
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", BOS)]
        )
    return made


def write_tokenizer(directory: Path, *, template: str | None = TEMPLATE, bos: bool = True) -> None:
    """Write tokenizer files as a Hugging Face checkpoint has them."""
    backend(bos=bos).save(str(directory / "tokenizer.json"))
    config = {
        "bos_token": "<bos>",
        "eos_token": {"__type": "AddedToken", "content": "<eos>"},
        "unk_token": "<unk>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)


def write_target(directory: Path, *, tokenizer: bool = True) -> Path:
    """Write the target as a checkpoint directory of ours."""
    _write(directory, TARGET, seed=1)
    if tokenizer:
        write_tokenizer(directory)
    return directory


def write_drafter(directory: Path, **changes: int) -> Path:
    """Write the drafter, or one with other numbers in its config."""
    _write(directory, replace(DRAFTER, **changes), seed=2)
    return directory


def write_assistant(directory: Path, **changes: int) -> Path:
    """Write the assistant, or one with other numbers in its config."""
    _write(directory, replace(ASSISTANT, **changes), seed=3)
    return directory


def _write(directory: Path, config: ModelConfig, *, seed: int) -> None:
    directory.mkdir()
    params = random_params(model_def_of(config, "float32"), seed)
    arrays = {n: LazyArray(p.shape, p.dtype, lambda p=p: np.asarray(p)) for n, p in params.items()}
    save_params(directory, arrays)
    Manifest(
        kind=family_of(config).name,
        config=config,
        generation=GENERATION if isinstance(config, Gemma4Config) else None,
        source="tests",
        revision=None,
        dtype="float32",
        tensors={},
        skipped=[],
    ).write(directory)
