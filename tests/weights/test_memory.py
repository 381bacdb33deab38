"""Conversion streams: it never holds a checkpoint, nor two copies of its largest tensor and 2 GB more.

The size in full is a slow test: 15 GB of random numbers, converted and written back. It takes minutes,
45 GB of disk and 8 GB of memory, and prints GB/s. pytest keeps its files; give them a place and delete it:

    pytest -m slow tests/weights/test_memory.py -s --basetemp=/tmp/e4b; rm -r /tmp/e4b
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxspec.weights.arrays import _BATCH_BYTES
from tests.checkpoints_convert import hf_layout

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc for the memory peak")

# VmHWM is the peak of this process; ru_maxrss would start at that of the one that forked it.
_MEASURED = """
import sys
from jaxspec.weights import arrays
from jaxspec.weights.conversion import convert, to_hf
from jaxspec.drafters import dflash  # and with it all that is imported when it is needed
import orbax.checkpoint
def peak():
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmHWM"))
source, ours, back, batch_bytes = sys.argv[1:]
arrays._BATCH_BYTES = int(batch_bytes)
before = peak()
for direction, *paths in ((convert, source, ours), (to_hf, ours, back)):
    report = direction(*paths)
    print(report.nbytes / 1e9, report.seconds, before / 1e9, peak() / 1e9)
"""


def _measure(directory: Path, batch_bytes: int = _BATCH_BYTES) -> list[dict[str, float]]:
    """Convert `hf` to `ours` and that to `back`, in a process of its own."""
    paths = [str(directory / name) for name in ("hf", "ours", "back")]
    # Freed arrays go back to the system at once: the peak is of what is held, not of what malloc keeps.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "100000"}
    run = subprocess.run(
        [sys.executable, "-c", _MEASURED, *paths, str(batch_bytes)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert run.returncode == 0, run.stderr
    names = ("gb", "seconds", "before_gb", "peak_gb")
    figures = [
        dict(zip(names, map(float, line.split()), strict=True)) for line in run.stdout.splitlines()
    ]
    for direction, values in zip(("convert", "to_hf"), figures, strict=True):
        values["gb_per_s"] = values["gb"] / values["seconds"]
        print(direction, json.dumps(values))
    return figures


def _largest_gb(shapes: hf_layout.Shapes) -> float:
    return max(map(math.prod, shapes.values())) * 2 / 1e9


def test_conversion_streams(tmp_path: Path):
    """The peak grows by two of the largest tensor and the buffers at most, far below the whole."""
    config = hf_layout.TINY["e4b"] | {
        "vocab_size": 20_000,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "vocab_size_per_layer_input": 20_000,
        "hidden_size_per_layer_input": 128,
    }
    shapes = hf_layout.target_shapes(config)
    hf_layout.write(tmp_path / "hf", config, shapes, shard_bytes=50 << 20)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 3
    limit = 2 * _largest_gb(shapes) + 0.1  # 0.1: Orbax, its threads, and batches as small as this
    for figures in _measure(tmp_path, batch_bytes=16 << 20):
        assert figures["peak_gb"] - figures["before_gb"] < limit < 0.9 * figures["gb"], figures


@pytest.mark.slow
def test_e4b_sized_checkpoint(tmp_path: Path):
    config: dict[str, Any] = hf_layout.RELEASED["e4b"]
    shapes = hf_layout.target_shapes(config, "model.language_model.")
    wrapped = hf_layout.multimodal(config)
    hf_layout.write(tmp_path / "hf", wrapped, shapes, shard_bytes=4_000_000_000)
    for figures in _measure(tmp_path):
        assert figures["gb"] > 14.9
        assert figures["peak_gb"] < 2 * _largest_gb(shapes) + 2
