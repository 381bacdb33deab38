"""New drafters: configs in the proportions of released ones, weights that start training well, and files.

Read `new_config`. A drafter may start from a simpler one (DFlash2 and DSpark from DFlash): what both have
is taken over, and what is new begins so that it changes nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from checkpoints_convert.errors import CheckpointError
from jaxspec.configs.base import ConfigError
from jaxspec.configs.dflash import DFlashConfig, default_feature_layers
from jaxspec.configs.dflash2 import DFlash2Config
from jaxspec.configs.dspark import DSparkConfig
from jaxspec.configs.mtp import MTPConfig
from jaxspec.registry import ModelConfig, families, family_of
from jaxspec.shapes import Array, Params
from jaxspec.weights.conversion import write_weights
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.model_def import ModelDef

MASKS = {262_144: 4, 151_936: 151_669}
"""The mask tokens of released drafters, by the target's vocabulary."""
RANK = 256
CONTAINERS = ("z-lab", "speculators")
"""The layouts of files of a new block drafter."""


def kinds() -> tuple[str, ...]:
    """Return the kinds of drafters that can be made."""
    return tuple(_NEW)


def new_config(
    kind: str,
    target: ModelConfig,
    *,
    layers: int | None = None,
    hidden_size: int | None = None,
    intermediate_size: int | None = None,
    num_heads: int | None = None,
    block_size: int = 8,
    mask_token_id: int | None = None,
    container: str = "z-lab",
) -> ModelConfig:
    """Return the config of a new drafter for a target.

    Args:
      kind: one of `kinds`.
      layers: None for 5, or for as many as there are feature layers to read of a small target; of assistants,
        for 4.
      hidden_size: of assistants; None for a quarter of the target's, and at least 128. Block drafters have the
        target's.
      intermediate_size: of the MLPs; None for twice the hidden size.
      num_heads: of queries; None for the width over the size of a head, of assistants for the target's.
      block_size: of block drafters.
      mask_token_id: of block drafters; None for that of released ones.
      container: of block drafters, one of `CONTAINERS`. A drafter in that of speculators has copies of the
        target's embedding and head, does not scale the first nor bend logits, and has windows that begin
        before the anchor: that container has no keys to say otherwise. Of DSpark, sliding layers are causal there.

    Raises:
      ConfigError: there is no such drafter for this target.
    """
    if kind not in _NEW:
        raise ConfigError(f"kind is {kind}; expected one of {', '.join(_NEW)}")
    config = _NEW[kind](
        target, _Sizes(layers, hidden_size, intermediate_size, num_heads, block_size, mask_token_id)
    )
    if container == "z-lab":
        return config
    if container not in CONTAINERS:
        raise ConfigError(f"container is {container}; expected one of {', '.join(CONTAINERS)}")
    if not hasattr(config, "block_size"):
        raise ConfigError(f"a drafter of kind {kind} has one layout only: leave the container out")
    if kind == "dspark":
        # vLLM 0.26 makes fc for as many feature layers as there are layers, and has sliding layers causal.
        count = config.num_layers
        config = dataclasses.replace(
            config,
            feature_layers=default_feature_layers(target.num_layers, count),
            causal=tuple(layer == "sliding" for layer in config.layer_types),
        )
    return dataclasses.replace(
        config,
        container=container,
        num_target_layers=None,
        own_embedding=True,
        own_head=True,
        scale_embeddings=False,
        final_logit_softcap=None,
        window_from_anchor="sliding" in config.layer_types,
    )


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """The sizes of a new drafter, as `new_config` takes them."""

    layers: int | None
    hidden_size: int | None
    intermediate_size: int | None
    num_heads: int | None
    block_size: int
    mask_token_id: int | None


def _block_fields(target: Any, sizes: _Sizes) -> dict[str, Any]:
    width = target.hidden_size
    if sizes.hidden_size not in (None, width):
        raise ConfigError(
            f"hidden_size is {sizes.hidden_size}, and a block drafter has the target's, {width}: leave it out"
        )
    count = sizes.layers or max(1, min(5, target.num_layers // 4))
    head_dim = 128 if width >= 1024 else 32
    heads = sizes.num_heads or max(1, width // head_dim)
    kv_heads = next(k for k in (8, 4, 2, 1) if heads % k == 0)
    windows = [spec.window for spec in target.layers if spec.window]
    taps = max(2, min(count + 1, target.num_layers - 1))
    mask_token_id = sizes.mask_token_id
    if mask_token_id is None:
        mask_token_id = MASKS.get(target.vocab_size, 4)
    return dict(
        vocab_size=target.vocab_size,
        hidden_size=width,
        layer_types=("full",) * count if not windows else ("sliding",) * (count - 1) + ("full",),
        causal=(False,) * count,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=sizes.intermediate_size or 2 * width,
        block_size=sizes.block_size,
        mask_token_id=mask_token_id,
        feature_layers=default_feature_layers(target.num_layers, taps),
        num_target_layers=target.num_layers,
        max_positions=target.max_positions,
        sliding_window=max(windows) if windows and count > 1 else None,
        scale_embeddings=True,
        final_logit_softcap=getattr(target, "final_logit_softcap", None),
    )


def _dflash(target: Any, sizes: _Sizes) -> DFlashConfig:
    return DFlashConfig(**_block_fields(target, sizes))


def _dflash2(target: Any, sizes: _Sizes) -> DFlash2Config:
    return _as_dflash2(_dflash(target, sizes))


def _as_dflash2(config: DFlashConfig) -> DFlash2Config:
    rank = min(RANK, config.hidden_size)
    return DFlash2Config(**_fields(config), selector_rank=rank)


def _dspark(target: Any, sizes: _Sizes) -> DSparkConfig:
    return _as_dspark(_dflash(target, sizes))


def _as_dspark(config: DFlashConfig) -> DSparkConfig:
    heads: dict[str, Any] = dict(markov_rank=min(RANK, config.hidden_size), confidence=True)
    return DSparkConfig(**_fields(config), **heads, confidence_with_markov=True)


def _fields(config: DFlashConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in DFlashConfig.__dataclass_fields__}


def _mtp(target: Any, sizes: _Sizes) -> MTPConfig:
    needed = ("full_num_kv_heads", "full_head_dim", "sliding_window")
    if any(getattr(target, name, None) is None for name in needed):
        raise ConfigError("an MTP assistant needs a target of Gemma 4; for this one take dflash")
    width = sizes.hidden_size or max(128, target.hidden_size // 4)
    rope = ("rope_theta", "full_rope_theta", "full_partial_rotary_factor", "full_rope_factor")
    return MTPConfig(
        vocab_size=target.vocab_size,
        hidden_size=width,
        backbone_hidden_size=target.hidden_size,
        layer_types=("sliding",) * ((sizes.layers or 4) - 1) + ("full",),
        num_heads=sizes.num_heads or target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        full_num_kv_heads=target.full_num_kv_heads,
        full_head_dim=target.full_head_dim,
        intermediate_size=sizes.intermediate_size or 2 * width,
        sliding_window=target.sliding_window,
        max_positions=target.max_positions,
        num_draft_tokens=min(5, sizes.block_size - 1),
        **{name: getattr(target, name) for name in rope},
    )


_NEW: dict[str, Callable[..., Any]] = {
    "dflash": _dflash,
    "dflash2": _dflash2,
    "dspark": _dspark,
    "mtp": _mtp,
}
_FROM_DFLASH: dict[str, Callable[[DFlashConfig], Any]] = {
    "dflash2": _as_dflash2,
    "dspark": _as_dspark,
}


def config_from(kind: str, start: ModelConfig) -> ModelConfig:
    """Return the config of a drafter of some kind that starts with the weights of another one.

    Raises:
      ConfigError: a drafter of this kind does not start from that one.
    """
    have = family_of(start).name
    if have == kind:
        return start
    if kind not in _FROM_DFLASH or type(start) is not DFlashConfig:
        raise ConfigError(
            f"a drafter of kind {kind} cannot start from one of kind {have}; dflash2 and dspark can start from dflash"
        )
    return _FROM_DFLASH[kind](start)


# --- weights -----------------------------------------------------------------------------------------


def start_params(
    model_def: ModelDef, target: LoadedModel, seed: int, start: Mapping[str, Array] | None = None
) -> Params:
    """Return float32 weights that training begins with.

    Args:
      start: weights of a drafter to start from. Those of the same names and shapes are taken.
    """
    config = model_def.config
    params = ModelDef(model_def.module, config, "float32").random_params(seed)
    sublayers = 2 * config.num_layers
    is_block = hasattr(config, "block_size")
    for name, value in params.items():
        last = name.rpartition(".")[2]
        if is_block and last in ("out", "down"):
            value = value * 0.5  # what a layer adds begins small
        elif is_block and last == "base":
            value = jnp.zeros_like(value).at[:, 0].set(1)  # the identity
        elif is_block and last in ("dynamic", "after", "confidence"):
            value = jnp.zeros_like(value)
        elif not is_block and last == "q_norm":
            value = value * value.shape[0] ** -0.25  # scores are not scaled
        elif last in ("post_attention_norm", "post_mlp_norm"):
            value = value * sublayers**-0.5
        elif not is_block and name == "head":
            value = _directions(target, config.hidden_size)
        elif is_block and name in ("embedding", "head"):
            value = _table(target, lookup=name == "embedding")
        params[name] = value
    for name, value in (start or {}).items():
        if name in params and params[name].shape == value.shape:
            params[name] = jnp.asarray(value, params[name].dtype)
    return params


def _directions(target: LoadedModel, width: int) -> Array:
    """Return each token's place along the directions in which the target's embeddings differ most.

    Likely tokens are then near each other from the start.
    """
    table = _table(target, lookup=True)
    _, vectors = jnp.linalg.eigh(table.T @ table)
    along = table @ vectors[:, -width:]
    if (lacking := width - along.shape[1]) > 0:
        along = jnp.pad(along, ((0, 0), (0, lacking)))
    return along / jnp.maximum(jnp.std(along, axis=0), 1e-6) * width**-0.5


def _table(target: LoadedModel, *, lookup: bool) -> Array:
    """Return the target's embedding, or its head, [V, D]."""
    declared = target.model_def.declared()
    tables = [name for name, about in declared.items() if about.table]
    name = next((n for n in tables if declared[n].lookup == lookup), tables[0])
    return target.model_def.dequantise({name: target.params[name]})[name].astype(jnp.float32)


# --- files -------------------------------------------------------------------------------------------


def write_hf(
    directory: Path,
    config: ModelConfig,
    params: Params,
    dtype: str,
    target: LoadedModel | None = None,
) -> None:
    """Write a new drafter in the layout of its container: z-lab's, speculators', or that of the assistants.

    Every convention on which engines disagree is in config.json.

    Args:
      directory: empty.
      target: what it drafts for. speculators' layout names it, and vLLM reads no file there without that name.

    Raises:
      CheckpointError: the layout cannot hold this config.
    """
    values, generation = hf_config(config)
    if target is not None and "speculators_config" in values:
        file = target.directory / "config.json"
        about = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        values["speculators_config"]["verifier"] = {
            "name_or_path": target.source,
            "architectures": about.get("architectures", []),
        }
    family = family_of(config)
    if (again := family.read(values, generation)) != config:
        other = [
            f.name
            for f in dataclasses.fields(config)
            if getattr(again, f.name) != getattr(config, f.name)
        ]
        raise CheckpointError(f"config.json cannot hold {', '.join(other)} of this drafter")
    write_weights(config, params, directory, prefix="", dtype=dtype)
    if generation is not None:
        _dump(generation, directory / "generation_config.json")
    _dump(values | {"dtype": dtype}, directory / "config.json")


def hf_config(config: Any) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return config.json and generation_config.json of a drafter; None for no such file."""
    if hasattr(config, "block_size"):
        layout = _speculators if config.container == "speculators" else _zlab
        return layout(config), None
    return _assistant(config), {"num_assistant_tokens": config.num_draft_tokens}


def _zlab(c: Any) -> dict[str, Any]:
    (family,) = (f for f in families("drafter") if f.config is type(c))
    own: dict[str, Any] = {"mask_token_id": c.mask_token_id}
    own |= {"target_layer_ids": list(c.feature_layers), "scale_embeddings": c.scale_embeddings}
    if isinstance(getattr(c, "selector_top_k", None), int):
        names = [f.name for f in dataclasses.fields(c) if f.name not in _fields(c)]
        own |= {name: getattr(c, name) for name in names}
    if getattr(c, "markov_rank", None) is not None:
        own |= {"projector_type": "dspark", "sample_from_anchor": c.sample_from_anchor}
        own |= _markov(c)
    values = {
        **_layers(c),
        "architectures": [family.architectures[0]],
        "block_size": c.block_size,
        "dflash_config": own,
        "final_logit_softcapping": c.final_logit_softcap,
        "num_target_layers": c.num_target_layers,
        "rope_theta": c.rope_theta,
        "tie_word_embeddings": False,
    }
    if len(set(c.causal)) == 1:
        own["causal"] = c.causal[0]
    elif family.read(values, None) != c:
        # A list is True to vLLM. What readers take of themselves is left out.
        own["causal"] = list(c.causal)
    return values


def _layers(c: Any) -> dict[str, Any]:
    """Return what both containers say of the layers of a block drafter, in the words of Qwen3."""
    windows = {"sliding_window": c.sliding_window} if "sliding" in c.layer_types else {}
    return {
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "layer_types": [f"{kind}_attention" for kind in c.layer_types],
        "max_position_embeddings": c.max_positions,
        "num_attention_heads": c.num_heads,
        "num_hidden_layers": c.num_layers,
        "num_key_value_heads": c.num_kv_heads,
        "rms_norm_eps": c.rms_norm_eps,
        "use_sliding_window": bool(windows),
        "vocab_size": c.vocab_size,
        **windows,
    }


def _markov(c: Any) -> dict[str, Any]:
    """Return what both containers say of DSpark's heads."""
    return {
        "markov_rank": c.markov_rank,
        "markov_head_type": c.markov_head_type,
        "enable_confidence_head": c.confidence,
        "confidence_head_with_markov": c.confidence_with_markov,
    }


def _speculators(c: Any) -> dict[str, Any]:
    """Return config.json in the container of speculators. Feature layers are named by the layer that reads them."""
    (family,) = (f for f in families("drafter") if f.config is type(c))
    own = {f.name: getattr(c, f.name) for f in dataclasses.fields(c) if f.name not in _fields(c)}
    if "markov_rank" in own:
        own = _markov(c)
    causal = {"is_causal": c.causal[0]} if len(set(c.causal)) == 1 else {}
    rope = {"rope_theta": c.rope_theta, "rope_type": "default"}
    proposal = {"proposal_type": "greedy", "speculative_tokens": c.max_draft_tokens}
    return {
        "architectures": [family.architectures[0]],
        "speculators_model_type": family.name,
        "speculators_config": {
            "algorithm": family.name,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
        },
        "aux_hidden_state_layer_ids": [i + 1 for i in c.feature_layers],
        "block_size": c.block_size,
        "draft_vocab_size": c.draft_vocab_size or c.vocab_size,
        "mask_token_id": c.mask_token_id,
        "sample_from_anchor": c.sample_from_anchor,
        "sliding_window_non_causal": not any(c.causal),
        "tie_word_embeddings": False,
        "transformer_layer_config": _layers(c) | {"rope_parameters": rope},
        **causal,
        **own,
    }


def _assistant(c: MTPConfig) -> dict[str, Any]:
    full_rope = {
        "partial_rotary_factor": c.full_partial_rotary_factor,
        "rope_theta": c.full_rope_theta,
        "rope_type": "proportional",
    }
    if c.full_rope_factor != 1:
        full_rope["factor"] = c.full_rope_factor
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": c.backbone_hidden_size,
        "num_window_keys": c.num_window_keys,
        "query_position": c.query_position,
        "text_config": {
            "model_type": "gemma4_text",
            "attention_bias": False,
            "attention_k_eq_v": True,
            "enable_moe_block": False,
            "final_logit_softcapping": None,
            "global_head_dim": c.full_head_dim,
            "head_dim": c.head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": c.hidden_size,
            "hidden_size_per_layer_input": 0,
            "intermediate_size": c.intermediate_size,
            "layer_types": [f"{kind}_attention" for kind in c.layer_types],
            "max_position_embeddings": c.max_positions,
            "num_attention_heads": c.num_heads,
            "num_global_key_value_heads": c.full_num_kv_heads,
            "num_hidden_layers": c.num_layers,
            "num_key_value_heads": c.num_kv_heads,
            "num_kv_shared_layers": c.num_layers,
            "rms_norm_eps": c.rms_norm_eps,
            "rope_parameters": {
                "full_attention": full_rope,
                "sliding_attention": {"rope_theta": c.rope_theta, "rope_type": "default"},
            },
            "sliding_window": c.sliding_window,
            "tie_word_embeddings": True,
            "use_double_wide_mlp": False,
            "vocab_size": c.vocab_size,
            "vocab_size_per_layer_input": 0,
        },
        "tie_word_embeddings": True,
        "use_ordered_embeddings": False,
    }


def _dump(values: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
