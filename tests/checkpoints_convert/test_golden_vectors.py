"""Layouts of quantised weights against matrices that their makers' libraries packed and unpacked.

`make_golden_quantised.py` made golden_quantised.npz with compressed-tensors 0.20, nvidia-modelopt 0.47 and gguf
0.19. AWQ and GPTQ have no library here. Theirs are a few numbers packed by hand, by the formulas of vLLM's
`auto_awq.py` and `auto_gptq.py`.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from checkpoints_convert.headers import DTYPES
from checkpoints_convert.quantised import layouts
from checkpoints_convert.quantised.quantization_config import Spec
from checkpoints_convert.quantised.stored_weights import GroupedFloat4, StoredWeight, numbers
from checkpoints_convert.rules import TensorSpec

GOLDEN = np.load(Path(__file__).with_name("golden_quantised.npz"))
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BYTES = {"weight_scale": ml_dtypes.float8_e4m3fn, "weight": ml_dtypes.float8_e4m3fn}


def golden(name: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the tensors of a module, and the numbers that they stand for."""
    parts = {key.partition("/")[2]: GOLDEN[key] for key in GOLDEN if key.startswith(f"{name}/")}
    expected = parts.pop("numbers")
    for part, array in parts.items():
        if array.dtype == np.uint16:
            parts[part] = array.view(ml_dtypes.bfloat16)
        elif array.dtype == np.uint8 and part in _BYTES and _is_float(name, part):
            parts[part] = array.view(_BYTES[part])
    return parts, expected


def _is_float(name: str, part: str) -> bool:
    return name.startswith("fp8") or (name.startswith("nvfp4") and part == "weight_scale")


def read(parts: dict[str, np.ndarray], configured: Spec | None = None) -> tuple[Spec, StoredWeight]:
    specs = {part: TensorSpec(a.shape, _NAMES[a.dtype]) for part, a in parts.items()}
    spec, shape = layouts.recognise("w", specs, configured)
    return spec, layouts.read("w", spec, shape, specs, parts.__getitem__)


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("fp8 channel", Spec("fp8", "channel")),
        ("int4 g32", Spec("int4", "group", 32)),
        ("int4 g32 zeros", Spec("int4", "group", 32, symmetric=False)),
        ("nvfp4 ct", Spec("nvfp4", "group", 16)),
        ("nvfp4 modelopt", Spec("nvfp4", "group", 16)),
        ("mxfp4", Spec("mxfp4", "group", 32)),
        ("q4_0", Spec("int4", "group", 32)),
        ("q8_0", Spec("int8", "group", 32)),
        ("q6_k", Spec("int6", "group", 16)),
    ],
)
def test_layouts_are_read_as_their_libraries_read_them(name, spec):
    parts, expected = golden(name)
    found_spec, source = read(parts)
    assert found_spec == spec
    found = source.dequantise()
    if name == "nvfp4 ct":  # rounds scale / global scale to bfloat16, then the product
        np.testing.assert_allclose(found, expected, rtol=2.0**-7)
    elif name in ("fp8 channel", "int4 g32", "int4 g32 zeros", "mxfp4"):  # works in bfloat16
        np.testing.assert_array_equal(found.astype(ml_dtypes.bfloat16), expected)
    elif name == "nvfp4 modelopt":  # multiplies the two scales first: one rounding differs
        np.testing.assert_allclose(found, expected, rtol=2.0**-22)
    else:
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(numbers(source, np.dtype(np.float32)), found)


def test_the_two_dialects_of_nvfp4_have_inverse_global_scales():
    (ct, _), (modelopt, _) = golden("nvfp4 ct"), golden("nvfp4 modelopt")
    whole = np.float32(ct["weight_global_scale"][0]) * modelopt["weight_scale_2"]
    np.testing.assert_allclose(whole, 1, rtol=0.01)  # one of them saw the weight in bfloat16
    for parts, name in ((ct, "weight_global_scale"), (modelopt, "weight_scale_2")):
        right = read(parts)[1].dequantise()
        wrong = read({**parts, name: np.asarray(1 / parts[name], np.float32)})[1].dequantise()
        assert not np.allclose(right, wrong, rtol=0.5)


def test_a_global_scale_multiplies_in_the_neutral_form():
    for name in ("nvfp4 ct", "nvfp4 modelopt"):
        _, source = read(golden(name)[0])
        assert isinstance(source, GroupedFloat4)
        assert source.factor is not None
        assert source.factor.shape == (16,)
        assert (source.factor < 1e-3).all()


def test_awq_by_hand():
    """Output j of eight is in nibble 0, 4, 1, 5, 2, 6, 3, 7 of a word, lowest bits first."""
    rows = [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]  # inputs x outputs
    words = [_word([row[i] for i in (0, 2, 4, 6, 1, 3, 5, 7)]) for row in rows]
    assert words[0] == 0x7531_6420
    parts = {
        "qweight": np.asarray(words, np.uint32).view(np.int32).reshape(2, 1),
        "qzeros": np.asarray([[_word([8] * 8)]], np.uint32).view(np.int32),
        "scales": np.arange(1, 9, dtype=np.float16)[None] / 2,
    }
    _, source = read(parts, Spec("int4", "group", 2, symmetric=False))
    expected = [[(row[j] - 8) * (j + 1) / 2 for row in rows] for j in range(8)]
    np.testing.assert_array_equal(source.dequantise(), expected)


def test_gptq_by_hand():
    """Input i of eight is in nibble i of a word. Zero points are stored less 1."""
    columns = [[0, 1, 2, 3, 4, 5, 6, 7], [15, 14, 13, 12, 11, 10, 9, 8]] * 4  # outputs x inputs
    stored = [6, 7, 8, 9, 15, 0, 1, 2]  # 15 stands for 16, which wraps to 0
    zeros = [7, 8, 9, 10, 0, 1, 2, 3]
    parts = {
        "qweight": np.asarray([[_word(c) for c in columns]], np.uint32).view(np.int32),
        "qzeros": np.asarray([[_word(stored)]], np.uint32).view(np.int32),
        "scales": np.full((1, 8), 0.5, np.float16),
        "g_idx": np.zeros(8, np.int32),
    }
    _, source = read(parts, Spec("int4", "group", 8, symmetric=False))
    expected = [[(q - zeros[j]) / 2 for q in column] for j, column in enumerate(columns)]
    np.testing.assert_array_equal(source.dequantise(), expected)


def _word(nibbles: list[int]) -> int:
    return sum(nibble << (4 * i) for i, nibble in enumerate(nibbles))
