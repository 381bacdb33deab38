"""Define models: from a config, with quantised weights, and with a dtype of keys and values.

Every function returns a `ModelDef` and touches no array.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from checkpoints_convert.errors import CheckpointError
from jaxspec.options import FieldError, shown
from jaxspec.quantised import QuantisedArray, get_format
from jaxspec.quantised.choice import check_format, missing_support
from jaxspec.quantised.kv import DTYPES, LEAST_CAPABILITY, KVFormat
from jaxspec.registry import ModelConfig, family_of, get_family, presets
from jaxspec.weights.model_def import ModelDef
from pallas_kernels.dispatch import capability


def model_def_of(config: ModelConfig, dtype: str) -> ModelDef:
    """Return the `ModelDef` of the model that a config describes, with weights of `dtype`."""
    return ModelDef(family_of(config).module(), config, dtype)


def random_drafter(preset: str, kind: str, dtype: str) -> tuple[ModelDef, str]:
    """Return a drafter for a target's preset, and a description of the drafter for messages.

    Args:
      preset: the name of a target's preset.
      kind: the name of the drafter's family.

    Raises:
      ValueError: there is no such preset or family, or the family has no drafter for the preset.
    """
    family, sizes = get_family(kind), presets()
    if preset not in sizes:
        raise ValueError(f"preset {preset!r} is not known; expected one of {', '.join(sizes)}")
    if family.drafter_for is None:
        raise ValueError(f"{family.title} is not made for presets")
    config, words = family.drafter_for(preset, sizes[preset])
    return model_def_of(config, dtype), words


# --- quantised weights -------------------------------------------------------------------------------


def formats_for(
    model_def: ModelDef, linears: str | None = None, tables: str | None = None
) -> dict[str, str]:
    """Return the format of every weight that is to be quantised, by name.

    Norms, scalars, routers and per-layer inputs stay as they are: they are small, or feel rounding
    most.

    Args:
      linears: of linears and experts; None leaves them as they are.
      tables: of embedding and head, likewise. Where they are one table (a tied head), its rows are
        rounded on the way in and on the way out.
    """
    formats = {}
    for name, about in model_def.declared().items():
        format = tables if about.table else linears
        if about.contracting_axes and format is not None:
            formats[name] = format
    return formats


def quantised_def(
    model_def: ModelDef, source: str, quantize: str | None, quantize_head: str | None, field: str
) -> ModelDef:
    """Return the model definition of a model that is to be quantised while it is loaded.

    What is stored quantised stays as it is. The options are for the rest. Only a format of the same
    arrays may take the place of another: fp8-dynamic that of fp8.

    Args:
      model_def: of what is stored at `source`.
      field: how the option that names the format of linears is called.

    Raises:
      FieldError: a format is not known or does not run here, or all that it is meant for is quantised
        already.
      CheckpointError: what is stored does not run here.
    """
    requested = {field: quantize, "quantize_head": quantize_head}
    requested = {name: format for name, format in requested.items() if format is not None}
    for name, format in requested.items():
        check_format(name, format)
    stored = dict(model_def.formats)
    of_option = {
        field: formats_for(model_def, linears=quantize),
        "quantize_head": formats_for(model_def, tables=quantize_head),
    }
    chosen: dict[str, str] = {}
    for name, wanted in of_option.items():
        can = {n: f for n, f in wanted.items() if n not in stored or _same_arrays(model_def, n, f)}
        if wanted and not can:
            raise FieldError(
                name,
                lambda format_field: (
                    f"{source} is quantised already, its weights are {model_def.storage}: leave out "
                    f"{' and '.join(format_field(option) for option in requested)}, or load the model "
                    "that it was made of"
                ),
            )
        chosen |= can
    for format in sorted(set(stored.values())):
        if (lacking := missing_support(format)) is not None:
            needs, works = lacking
            build = f"a build in {works}, or " if works else ""
            later = " with --quantize int8" if works else ""
            raise CheckpointError(
                f"the weights of {source} are {format}, {needs}: take {build}the bfloat16 "
                f"release{later}"
            )
    return model_def.with_formats(stored | chosen)


def _same_arrays(model_def: ModelDef, name: str, format: str) -> bool:
    """Return whether the stored arrays of a quantised weight are those of another format too."""
    weight = model_def.abstract_params()[name]
    assert isinstance(weight, QuantisedArray)
    return weight.parts == get_format(format).parts(weight.shape, weight.contracting_axes)


# --- keys and values ---------------------------------------------------------------------------------


def with_kv_dtype(
    model_def: ModelDef, kv_dtype: str | None, scales: tuple[tuple[float, float], ...] | None = None
) -> ModelDef:
    """Return the model definition of a target that stores keys and values in a dtype.

    Args:
      kv_dtype: one of `DTYPES`; None for the dtype that they are computed in.
      scales: of keys and of values for each layer, from the checkpoint, if it has any.

    Raises:
      FieldError: the dtype is not known, or does not suit the target or this device.
    """
    if kv_dtype is None:
        return model_def
    if kv_dtype not in DTYPES:
        expected = ", ".join(DTYPES)
        raise FieldError("kv_dtype", f"is {shown(kv_dtype)}; expected one of {expected}")
    if kv_dtype == model_def.dtype:
        return model_def
    if DTYPES[kv_dtype].itemsize > jnp.dtype(model_def.dtype).itemsize:
        raise FieldError(
            "kv_dtype",
            lambda format_field: (
                f"{format_field('kv_dtype', kv_dtype)} holds what is computed in {model_def.dtype}, "
                "so it takes more bytes for the same numbers: leave it out, or give "
                f"{format_field('dtype', kv_dtype)}"
            ),
        )
    if kv_dtype == "fp8":
        _check_fp8(model_def, scales)
    scales = scales if kv_dtype == "fp8" else None
    return dataclasses.replace(model_def, kv=KVFormat(kv_dtype, scales))


def _check_fp8(model_def: ModelDef, scales: tuple[tuple[float, float], ...] | None) -> None:
    if scales is None and not model_def.config.normed_values:
        raise FieldError(
            "kv_dtype",
            f"is fp8, but {model_def.module.__name__} does not norm its values, so nothing bounds "
            "them but the text, and this checkpoint has no scales of keys and values: use bfloat16, "
            "or a checkpoint with calibrated scales (self_attn.k_scale and v_scale)",
        )
    if scales is not None and len(scales) != model_def.config.num_layers:
        raise FieldError(
            "kv_dtype",
            f"is fp8, and the checkpoint has scales of {len(scales)} of "
            f"{model_def.config.num_layers} layers",
        )
    available = capability()
    if available is not None and available < LEAST_CAPABILITY:
        kind = jax.devices()[0].device_kind
        raise FieldError(
            "kv_dtype",
            f"is fp8, which needs an NVIDIA GPU of compute capability {LEAST_CAPABILITY}; {kind} "
            f"has {available}: use bfloat16",
        )
