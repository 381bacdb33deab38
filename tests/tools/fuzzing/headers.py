"""Mutated safetensors files and their index.

What is accepted must be what the safetensors package reads from the same files.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from jaxspec.configs.base import ConfigError
from jaxspec.weights.loading import CheckpointError
from jaxspec.weights.source import open_hf_source
from tests.checkpoints_convert import hf_layout
from tests.checkpoints_convert.hf_layout import TINY, TINY_DRAFTER
from tests.tools.fuzzing import mutate
from tests.tools.fuzzing.outcomes import Case, Fault, Outcome, judge

DOCUMENTED = (CheckpointError, ConfigError)
LFS, LFS_NAME = "a git-lfs pointer", "Git LFS"
INDEX = "model.safetensors.index.json"


def fuzz(directory: Path, count: int, seed: int = 0) -> Iterator[Case]:
    """Yield the outcomes of so many mutated files."""
    small = TINY["31b"]
    hf_layout.write(
        directory / "sharded", small, hf_layout.target_shapes(small), shard_bytes=40_000
    )
    hf_layout.write(directory / "single", TINY_DRAFTER, hf_layout.drafter_shapes(TINY_DRAFTER))
    files = [f for d in ("sharded", "single") for f in sorted((directory / d).glob("model*"))]
    for i in range(count):
        rng = random.Random(f"headers {seed} {i}")
        yield _case(directory / "case", files[i % len(files)], rng, i)


def _case(place: Path, good: Path, rng: random.Random, number: int) -> Case:
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(good.parent, place)
    file = place / good.name
    if file.name == INDEX:
        (what, text), names = _of_json(rng, json.loads(file.read_bytes()))
        file.write_bytes(text)
    else:
        what, names = _of_tensors(rng, file)
    places = (str(place),)

    def run() -> None:
        source = open_hf_source(place)
        _check(place, {n: source.checkpoint.read(n) for n in source.checkpoint.tensors})

    return judge(
        f"{number} {good.parent.name}/{good.name}: {what}",
        run,
        documented=DOCUMENTED,
        names=(LFS_NAME,) if what == LFS else (*names, file.name, "does not fit its config.json"),
        places=places,
    )


def _of_json(rng: random.Random, document: Any) -> tuple[tuple[str, bytes], list[str]]:
    mutation = mutate.mutated(rng, document, ())
    names = [str(part) for part in mutation.path if isinstance(part, str)]
    return (mutation.words, mutation.text), names[-1:]


def _of_tensors(rng: random.Random, file: Path) -> tuple[str, list[str]]:
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    names = sorted(n for n in header if n != "__metadata__")
    if rng.random() < 0.35:
        return _of_bytes(rng, file, raw, length)
    which = rng.randrange(8)
    name, other = rng.sample(names, 2)
    if which == 0:
        header[name], header[other] = header[other], header[name]
        words = f"{name} and {other} swapped"
    elif which == 1:
        header[name]["dtype"] = new = rng.choice(
            ("F16", "I16", "F32", "bf16", "BF17", "F8_E4M3", "BOOL", "", 5, None, ["BF16"], True)
        )
        words = f"dtype of {name} = {new!r}"
    elif which == 2:
        shape = header[name]["shape"]
        new = rng.choice(
            (
                *(shape[::-1], [*shape, 1], shape[:-1], [*shape, 0], [-n for n in shape], []),
                *([float(n) for n in shape], [True, *shape], [2**40, 2**40], "abc", None, {}, 7),
                *([2**63, 0], [str(n) for n in shape], [shape]),
            )
        )
        header[name]["shape"] = new
        words = f"shape of {name} = {mutate.shown(new)}"
    elif which == 3:
        start, end = header[name]["data_offsets"]
        new = rng.choice(
            (
                *([end, start], [start], [start, end, end], [start - 1, end - 1], [0, 2**70], []),
                *([float(start), float(end)], None, {}, "ab", ["0", "2"], [True, False], [-2, 0]),
                *([start + 2, end + 2], [0, end], [start, start]),
            )
        )
        header[name]["data_offsets"] = new
        words = f"data_offsets of {name} = {mutate.shown(new)}"
    elif which == 4:
        del header[name]
        words = f"{name} removed"
    elif which == 5:
        new = rng.choice(("", "a" * 100_000, "layers.0.more", "\ud800", "model.layers.99.x"))
        header[new] = header.pop(name)
        words = f"{name} renamed to {mutate.shown(new)}"
    elif which == 6:
        header["__metadata__"] = new = rng.choice(
            (None, 5, [], {}, {"format": 5}, {"format": "tf"}, "abc", {"a": {"b": []}})
        )
        words = f"__metadata__ = {new!r}"
    else:
        mutation, about = _of_json(rng, header)
        text = mutation[1]
        file.write_bytes(len(text).to_bytes(8, "little") + text + data)
        return f"header: {mutation[0]}", about
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return words, [name]


def _of_bytes(rng: random.Random, file: Path, raw: bytes, length: int) -> tuple[str, list[str]]:
    which = rng.randrange(9)
    if which == 0:
        new = rng.choice(
            (0, 1, length - 1, length + 1, len(raw) - 8, len(raw) - 7, 2**63, 2**64 - 1)
        )
        file.write_bytes(new.to_bytes(8, "little") + raw[8:])
        return f"the header's length = {new}", []
    if which == 1:
        at = rng.choice((rng.randrange(10), rng.randrange(len(raw)), len(raw) - 1))
        file.write_bytes(raw[:at])
        return f"cut to {at} bytes", []
    if which == 2:
        file.write_bytes(raw + b"\0" * rng.choice((1, 8, 1000)))
        return "longer", []
    if which == 3:
        file.write_bytes(mutate.LFS.encode())
        return LFS, []
    if which == 4:  # sparse: as long as its header says, and hardly on the disk
        size = rng.choice((150 << 20, 600 << 20))
        file.write_bytes(size.to_bytes(8, "little"))
        os.truncate(file, size + 8)
        return f"a header of {size >> 20} MB", []
    if which == 5:
        padded = raw[8 : 8 + length] + b" " * 64
        file.write_bytes(len(padded).to_bytes(8, "little") + padded + raw[8 + length :])
        return "a padded header", []
    if which == 6:
        at = 8 + rng.randrange(length)
        file.write_bytes(raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :])
        return f"byte {at} replaced", []
    if which == 7:
        file.unlink()
        if rng.random() < 0.5:
            file.mkdir()
            return "a directory", []
        file.symlink_to(file)
        return "a link to itself", []
    depth = rng.choice((500, 3000, 200_000))
    text = b'{"a":' * depth + b"1" + b"}" * depth
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    return f"a header {depth} deep", []


def _check(place: Path, found: dict[str, np.ndarray]) -> None:
    try:
        wanted = {n: a for f in place.glob("model*.safetensors") for n, a in load_file(f).items()}
    except Exception as error:
        said = f"{type(error).__name__}: {str(error)[:100]}"
        raise Fault(Outcome.NONSENSE, f"the safetensors package refuses it: {said}") from None
    different = [
        n
        for n in wanted
        if n not in found
        or (found[n].dtype, found[n].shape) != (wanted[n].dtype, wanted[n].shape)
        or found[n].tobytes() != wanted[n].tobytes()
    ]
    if different or set(found) != set(wanted):
        raise Fault(Outcome.MISREAD, f"other arrays: {different[:3]}")
