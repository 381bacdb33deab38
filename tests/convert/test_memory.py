"""Conversion streams: it never holds a checkpoint, nor two copies of its largest tensor and 2 GB more.

The size in full is a slow test of half an hour's disk space: 15 GB of random numbers, written, converted,
and written back. Run it with

    pytest -m slow tests/convert/test_memory.py -s
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.convert import hf_layout

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc for the memory peak")

# VmHWM is the peak of this process; ru_maxrss would start at that of the one that forked it.
_MEASURED = """
import sys
def peak():
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmHWM"))
from pathlib import Path
from checkpoints_convert.convert import convert, to_hf
from jaxspec.checkpoint import graph_of, Manifest
import orbax.checkpoint
before = peak()
direction, source, destination = sys.argv[1:]
report = convert(source, destination) if direction == "convert" else to_hf(source, destination)
print(report.nbytes, report.seconds, before, peak())
"""


def _measure(direction: str, source: Path, destination: Path) -> dict[str, float]:
    command = [sys.executable, "-c", _MEASURED, direction, str(source), str(destination)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    nbytes, seconds, before, peak = map(float, run.stdout.split())
    figures = {"gb": nbytes / 1e9, "seconds": seconds, "gb_per_s": nbytes / 1e9 / seconds}
    figures |= {"before_gb": before / 1e9, "peak_gb": peak / 1e9}
    print(direction, json.dumps(figures))
    return figures


def _largest_gb(shapes: hf_layout.Shapes) -> float:
    return max(map(math.prod, shapes.values())) * 2 / 1e9


def test_conversion_streams(tmp_path: Path):
    """The peak grows by less than two of the largest tensor and the buffers, far below the whole."""
    config = hf_layout.TINY["e4b"] | {
        "vocab_size": 20_000,
        "hidden_size": 1024,
        "intermediate_size": 8192,
        "vocab_size_per_layer_input": 40_000,
        "hidden_size_per_layer_input": 128,
    }
    shapes = hf_layout.target_shapes(config)
    hf_layout.write(tmp_path / "hf", config, shapes, shard_bytes=100 << 20)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 3
    largest = _largest_gb(shapes)
    for direction, source, out in (("convert", "hf", "ours"), ("to_hf", "ours", "back")):
        figures = _measure(direction, tmp_path / source, tmp_path / out)
        assert figures["gb"] > 0.5
        grown = figures["peak_gb"] - figures["before_gb"]
        assert grown < 2 * largest + 0.2, figures  # 0.2: slab, Orbax and its threads


@pytest.mark.slow
def test_e4b_sized_checkpoint(tmp_path: Path):
    config: dict[str, Any] = hf_layout.RELEASED["e4b"]
    shapes = hf_layout.target_shapes(config, "model.language_model.")
    started = time.perf_counter()
    hf_layout.write(
        tmp_path / "hf", hf_layout.multimodal(config), shapes, shard_bytes=4_000_000_000
    )
    print(f"written in {time.perf_counter() - started:.0f} s")
    limit = 2 * _largest_gb(shapes) + 2
    assert _measure("convert", tmp_path / "hf", tmp_path / "ours")["peak_gb"] < limit
    assert _measure("to_hf", tmp_path / "ours", tmp_path / "back")["peak_gb"] < limit
