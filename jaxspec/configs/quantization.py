"""What a config.json says about quantised weights, and which of it is not read.

Foreign names stop here: this module knows what `quantization_config` holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.configs.fields import ConfigError
from jaxspec.records import shown

KEYS = ("quantization_config", "compression_config")
_TITLES = {
    "compressed-tensors": "compressed-tensors",
    "awq": "AWQ",
    "gptq": "GPTQ",
    "bitsandbytes": "bitsandbytes",
    "fp8": "block-wise FP8",
    "modelopt": "NVIDIA ModelOpt",
    "mxfp4": "MXFP4",
    "gemma": "Gemma's mobile format of 2 and 4 bits",
    "gguf": "GGUF",
    "hqq": "HQQ",
    "quanto": "Quanto",
    "torchao": "torchao",
    "eetq": "EETQ",
}
_CT_FORMATS = {
    "float-quantized": "FP8",
    "naive-quantized": "FP8 or INT8",
    "int-quantized": "INT8",
    "pack-quantized": "4-bit groups",
    "nvfp4-pack-quantized": "NVFP4",
    "mxfp4-pack-quantized": "MXFP4",
    "mixed-precision": "several formats",
}
WAY_OUT = (
    "take the bfloat16 release of the model, and quantize it while it is loaded: --quantize int8 or "
    '--quantize fp8, in Python quantize="int8"'
)


def refuse_quantised(config: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose config.json announces quantised weights.

    Raises:
      ConfigError: it does; the message names the format.
    """
    parts = [config, config.get("text_config")]
    for part in parts:
        for key in KEYS if isinstance(part, Mapping) else ():
            if found := part.get(key):
                raise ConfigError(
                    f"config.json has a {key}: its weights are quantised, {_named(found)}. Such "
                    f"files are not read yet; {WAY_OUT}"
                )


def _named(found: Any) -> str:
    """Name a format of quantised weights."""
    if not isinstance(found, Mapping):
        return f"as {shown(found)}"
    method, layout = found.get("quant_method"), found.get("format") or found.get("quant_algo")
    title = _TITLES.get(str(method).lower(), "")
    words = title or f"by a method that is not known, {shown(method)}"
    if title and isinstance(layout, str):
        more = _CT_FORMATS.get(layout)
        words += f" {shown(layout)}" + (f", {more}" if more else "")
    return words
