"""Make golden_quantised.npz: quantised matrices as the makers' own libraries pack and unpack them.

It needs torch, compressed-tensors 0.20, nvidia-modelopt 0.47 and gguf 0.19, which the tests do not:

    python tests/tools/make_golden_quantised.py

Of each format the file has the tensors of a module ("nvfp4 modelopt/weight_scale_2") and the numbers that the
library unpacks them to ("nvfp4 modelopt/numbers").
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

ROWS = 16
GOLDEN = Path(__file__).parents[1] / "checkpoints_convert/golden_quantised.npz"


def main() -> None:
    """Write the file beside the test that reads it."""
    made = {**_compressed_tensors(), **_modelopt(), **_gguf()}
    np.savez_compressed(GOLDEN, **made)  # type: ignore[arg-type]


def _weight(inputs: int = 64) -> Any:
    import torch

    generator = torch.Generator().manual_seed(5)
    return torch.randn(ROWS, inputs, generator=generator, dtype=torch.float32) / 8


def _raw(tensor: Any) -> np.ndarray:
    """Return a tensor as numpy; small floats as bytes."""
    import torch

    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8).numpy()
    return tensor.numpy()


def _compressed_tensors() -> dict[str, np.ndarray]:
    import torch
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "fp8 channel": ("float-quantized", dict(num_bits=8, type="float", strategy="channel")),
        "int4 g32": (
            "pack-quantized",
            dict(num_bits=4, type="int", strategy="group", group_size=32),
        ),
        "int4 g32 zeros": (
            "pack-quantized",
            dict(num_bits=4, type="int", strategy="group", group_size=32, symmetric=False),
        ),
        "nvfp4 ct": (
            "nvfp4-pack-quantized",
            dict(num_bits=4, type="float", strategy="tensor_group", group_size=16),
        ),
        "mxfp4": (
            "mxfp4-pack-quantized",
            dict(
                num_bits=4,
                type="float",
                strategy="group",
                group_size=32,
                scale_dtype=torch.uint8,
                zp_dtype=torch.uint8,
            ),
        ),
    }
    found = {}
    for name, (format, options) in kinds.items():
        weight = _weight().to(torch.bfloat16)
        args = QuantizationArgs(**options)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        state = {"weight": weight}
        groups = weight.reshape(ROWS, -1, options.get("group_size", 64))
        low, high = groups.amin(-1), groups.amax(-1)
        if name == "nvfp4 ct":
            state["weight_global_scale"] = generate_gparam(low.min(), high.max()).reshape(1)
        scale, zero = calculate_qparams(
            low, high, args, global_scale=state.get("weight_global_scale")
        )
        state["weight_scale"] = scale
        if not args.symmetric:
            state["weight_zero_point"] = zero
        compressor = BaseCompressor.get_value_from_registry(format)
        packed = compressor.compress(state, scheme)
        numbers = compressor.decompress(dict(packed), scheme)["weight"]
        found |= {f"{name}/{part}": _raw(tensor) for part, tensor in packed.items()}
        found[f"{name}/numbers"] = numbers.float().numpy()
    return found


def _modelopt() -> dict[str, np.ndarray]:
    import torch
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    weight = _weight()
    packed, scale, whole = NVFP4QTensor.quantize(weight, 16)
    numbers = packed.dequantize(
        torch.float32, scale=scale, double_scale=whole, block_sizes={-1: 16}
    )
    parts = {"weight": packed._quantized_data, "weight_scale": scale, "weight_scale_2": whole}
    found = {f"nvfp4 modelopt/{part}": _raw(tensor) for part, tensor in parts.items()}
    return {**found, "nvfp4 modelopt/numbers": numbers.numpy()}


def _gguf() -> dict[str, np.ndarray]:
    import gguf

    found = {}
    kinds = {"q4_0": gguf.GGMLQuantizationType.Q4_0, "q8_0": gguf.GGMLQuantizationType.Q8_0}
    for name, kind in kinds.items():
        blocks = gguf.quantize(_weight().numpy(), kind)
        found |= {f"{name}/{name}": blocks, f"{name}/numbers": gguf.dequantize(blocks, kind)}
    # The package unpacks Q6_K and does not pack it. Any bytes are codes; the scales are kept sane.
    blocks = np.random.default_rng(3).integers(0, 256, (ROWS, 210), np.uint8)
    blocks[:, 208:] = np.full((ROWS, 1), 0.01, np.float16).view(np.uint8)
    kind = gguf.GGMLQuantizationType.Q6_K
    return found | {"q6_k/q6_k": blocks, "q6_k/numbers": gguf.dequantize(blocks, kind)}


if __name__ == "__main__":
    main()
