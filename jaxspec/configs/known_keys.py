"""The keys of config files that are not read. Read `refuse_unknown`, then `unapplied`.

Readers name the keys that they read. Of all others only those below are accepted: what transformers, trainers
and quantisers write down for themselves. A key that nobody here knows may stand for a computation that is not done, and
the text would be wrong without a sign. Of generation_config.json, which tells habits of decoding and not what the
model computes, such keys are named instead.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jaxspec.configs.fields import ConfigError, object_of, refuse_unless
from jaxspec.options import shown

_MOST_SHOWN = 8


def refuse_unknown(
    config: Mapping[str, Any],
    read: Collection[str],
    *,
    only: Mapping[str, Sequence[Any]] | None = None,
    within: str = "",
) -> None:
    """Refuse a config.json with keys that are neither read nor known to change nothing.

    A key without a value (null) is as good as absent. Keys that begin with "_" are programs' own.

    Args:
      config: the file, or an object in it.
      read: the keys that a reader has read, or will read.
      only: keys that may have these values alone, because the others change the computation.
      within: the key of the object, for messages.

    Raises:
      ConfigError: naming such keys, and harmless ones that hold nonsense.
    """
    where, unknown = f"{within}." if within else "", []
    for key, value in config.items():
        if value is None or key in read or key.startswith("_"):
            continue
        if only is not None and key in only:
            refuse_unless({where + key: value}, where + key, only[key])
        elif kind := _kind_of(key):
            if not _KINDS[kind](value):
                raise ConfigError(f"config.json: {where}{key} is {shown(value)}; it must be {kind}")
        else:
            unknown.append(f"{where}{key} = {shown(value)}")
    if unknown:
        more = f" and {len(unknown) - _MOST_SHOWN} more" if len(unknown) > _MOST_SHOWN else ""
        raise ConfigError(
            f"config.json has {', '.join(unknown[:_MOST_SHOWN])}{more}, which jaxspec does not know. A key "
            "may stand for a computation that would be left out: take out of config.json what changes none"
        )


def check_plain_rope(config: Mapping[str, Any]) -> None:
    """Refuse stretched positions, and rotary embeddings that turn a part of a head only.

    Raises:
      ConfigError: naming the key.
    """
    for name in ("rope_parameters", "rope_scaling"):
        rope = object_of(config, name)
        kind = rope.get("rope_type", rope.get("type", "default"))  # older files say "type"
        if kind != "default":
            raise ConfigError(
                f"config.json has {name} with rope_type {shown(kind)}; only 'default' is supported, which "
                f"reaches max_position_embeddings. Take {name} out if the weights were made without it"
            )
        only = {"factor": (1.0,), "partial_rotary_factor": (1.0,)}
        refuse_unknown(rope, ("rope_type", "type", "rope_theta"), only=only, within=name)


def _kind_of(key: str) -> str | None:
    if key in KIND_OF:
        return KIND_OF[key]
    if re.fullmatch(r".+_token_(id|index)", key):
        return "a token id"
    return "anything" if re.match(_OF_TOWERS, key) else None


def _is_number(value: Any) -> bool:
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_real and math.isfinite(value)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_KINDS: dict[str, Callable[[Any], bool]] = {
    "true or false": lambda value: isinstance(value, bool),
    "a number": _is_number,
    "a token id": _is_id,
    "a word": lambda value: isinstance(value, str),
    "a token id, or a list of them": lambda value: (
        _is_id(value) or (isinstance(value, list) and all(map(_is_id, value)))
    ),
    "a list": lambda value: isinstance(value, list),
    "an object": lambda value: isinstance(value, Mapping),
    "anything": lambda value: True,
}

# What of images and sound only their towers read.
_OF_TOWERS = r"(vision|audio|image|video)_"

_HARMLESS: dict[str, str] = {
    "true or false": (
        "add_cross_attention auf do_sample early_stopping has_no_defaults_at_init is_decoder "
        "is_encoder_decoder output_attentions "
        "output_hidden_states output_router_logits output_scores remove_invalid_values return_dict "
        "return_dict_in_generate tie_encoder_decoder tie_word_embeddings torchscript unsloth_fixed "
        "use_bfloat16 use_cache"
    ),
    "a number": (
        "attention_dropout ce_loss_alpha chunk_size_feed_forward confidence_head_alpha diversity_penalty "
        "emb_dim encoder_no_repeat_ngram_size gru_hidden_dim initializer_range l1_loss_alpha "
        "lambda_base_decay_ratio lambda_base_start length_penalty loss_decay_gamma max_anchors "
        "max_length max_window_layers min_length model_max_length "
        "no_repeat_ngram_size num_anchors num_assistant_tokens num_beam_groups num_beams num_labels "
        "num_return_sequences pretraining_tp pure_draft_prefix_len repetition_penalty "
        "router_aux_loss_coef swa_window_size temperature "
        "top_k top_p training_block_size typical_p"
    ),
    "a word": (
        "dtype finetuning_task model_name model_type num_assistant_tokens_schedule prefix problem_type "
        "processor_class speculators_version target_model_type target_text_model_type "
        "tokenizer_class torch_dtype transformers_version"
    ),
    "a token id, or a list of them": (
        "begin_suppress_tokens eos_token_id forced_eos_token_id suppress_tokens"
    ),
    "a list": "architectures bad_words_ids",
    "an object": "auto_map id2label label2id pruned_heads task_specific_params",
    "anything": (
        "compression_config measured_acceptance quantization_config transformers.js_config "
        "unsloth_version"
    ),
}
KIND_OF = {key: kind for kind, keys in _HARMLESS.items() for key in keys.split()}
"""What a key must hold, although it is not used."""


def unapplied(generation: Mapping[str, Any], read: Collection[str]) -> dict[str, Any]:
    """Return what a generation_config.json asks of decoding that is not done, by key.

    Values that ask for nothing are left out, and so are limits of length, which each request has for itself.

    Args:
      read: the keys that a reader has read.
    """
    return {
        key: value
        for key, value in generation.items()
        if value not in _NOTHING.get(key, (None,))
        and not (value is None or key in read or key in _OF_OTHERS or key.startswith("_"))
    }


_NOTHING: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "top_h"), (0,)),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff"), (0,)),
    **dict.fromkeys(("diversity_penalty", "penalty_alpha", "presence_penalty"), (0,)),
    **dict.fromkeys(("encoder_repetition_penalty", "typical_p", "num_beams"), (1,)),
    **dict.fromkeys(("num_beam_groups", "guidance_scale"), (1,)),
    **dict.fromkeys(("remove_invalid_values", "renormalize_logits", "token_healing"), (False,)),
    **dict.fromkeys(("bad_words_ids", "begin_suppress_tokens", "stop_strings"), ([],)),
    **dict.fromkeys(("constraints", "force_words_ids", "sequence_bias"), ([], {})),
    "frequency_penalty": (0,),
}
"""The values with which these keys of generation_config.json ask for nothing."""

_OTHERS = """
bos_token_id pad_token_id decoder_start_token_id transformers_version max_length max_new_tokens
num_return_sequences early_stopping length_penalty use_cache cache_implementation cache_config
max_cache_len low_memory prefill_chunk_size compile_config disable_compile continuous_batching_config
output_attentions output_hidden_states output_scores output_logits return_dict_in_generate use_mtp
is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
assistant_early_exit assistant_lookbehind target_lookbehind assistant_ensemble_weight
speculation_type prompt_lookup_num_tokens max_matching_ngram_size
"""
_OF_OTHERS = frozenset(_OTHERS.split())
"""Keys that change no token of a completion here: limits, beams' own, and how another program works."""
