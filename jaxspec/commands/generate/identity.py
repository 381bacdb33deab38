"""By what a row is known again: digests of all that shapes it.

Read `row_digest`. What only changes rounding is left out: the batch size, the cache length, the mesh and the
device. So a run that had too little memory goes on with a smaller batch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxspec.commands.generate.jsonl import Prompt
from jaxspec.engine.request import Request
from jaxspec.state import DecodeSpec
from jaxspec.weights.loading import LoadedModel

_SAMPLES, _SAMPLE_BYTES = 8, 4096


def models_digest(spec: DecodeSpec, target: LoadedModel, drafter: LoadedModel | None) -> str:
    """Return a digest of the models, their dtype, and how they draft."""
    drafting = dataclasses.asdict(spec.drafting) if drafter else None
    directories = [fingerprint(model.directory) for model in (target, drafter) if model]
    quantised = [spec.drafter.storage] if spec.drafter and spec.drafter.formats else []
    return _digest([1, directories, spec.target.dtypes, *quantised, drafting])  # 1: of this format


def row_digest(
    models: str, place: Sequence[int | None], prompt: Prompt, request: Request, stop: Sequence[str]
) -> str:
    """Return a digest of one row.

    Args:
      models: `models_digest`.
      place: the prompt's index, and which sample of it.
      request: as it is decoded, but for what decodes it.
      stop: its stop texts.
    """
    asked = dataclasses.asdict(dataclasses.replace(request, id=None, stop_at=None, grammar=None))
    del asked["grammar"]  # rows of files that were written before there were any have none
    rules = [] if request.grammar is None else [request.grammar.source]
    return _digest([models, place, prompt.id, prompt.extra, asked, list(stop), *rules])


def fingerprint(directory: Path) -> str:
    """Return a digest of a checkpoint's files: their names, sizes and contents.

    Of a file above 32 KiB, eight pieces stand for the rest. Training changes all weights, so it changes these too.
    The directory's own name does not count: a checkpoint may be elsewhere when a run goes on.
    """
    found = hashlib.sha256()
    for path in sorted(_files(directory)):
        size = path.stat().st_size
        found.update(f"{path.relative_to(directory)} {size}\n".encode())
        with path.open("rb") as file:
            if size <= _SAMPLES * _SAMPLE_BYTES:
                found.update(file.read())
                continue
            for i in range(_SAMPLES):
                file.seek((size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
                found.update(file.read(_SAMPLE_BYTES))
    return found.hexdigest()


_FILES = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "manifest.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "*.safetensors",
    "*.gguf",
    "params/**/*",
)
"""What a model and its tokenizer are loaded from: not what a trainer keeps beside it, or results there."""


_OF_THE_WRITING = ("_CHECKPOINT_METADATA", "commit_success.txt")
"""Where Orbax says when and where it wrote."""


def _files(directory: Path) -> Iterator[Path]:
    for pattern in _FILES:
        for path in directory.glob(pattern):
            if path.is_file() and path.name not in _OF_THE_WRITING:
                yield path


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]
