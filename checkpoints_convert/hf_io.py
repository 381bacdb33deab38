"""Find Hugging Face checkpoints on disk or on the hub, read their tensors, and write new ones.

This module reads and writes safetensors files itself, with plain file reads and writes. The
safetensors package maps files into memory, and mapped pages count as resident memory. For one 5 GB
tensor that breaks the promise on peak memory. Nothing here knows what a tensor means.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints_convert.errors import CheckpointError, listed
from checkpoints_convert.files import read_json
from checkpoints_convert.headers import DTYPES, StoredTensor, nbytes_of, read_header
from checkpoints_convert.quantised.gguf import read_gguf
from checkpoints_convert.rules import TensorSpec, unwrapped

CONFIG_FILES = ("config.json", "generation_config.json")
QUANTIZATION_FILE = "hf_quant_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)

ADAPTER_FILE = "adapter_config.json"

_LOG = logging.getLogger(__name__)
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_WEIGHTS = "model*.safetensors"
_SLAB_BYTES = 64 << 20  # read at a time by a cast, or by a thread
_READERS = 8
_SHARD_BYTES = 5 << 30


# --- finding -------------------------------------------------------------------------------------


def resolve(
    source: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    offline: bool = False,
    configs_only: bool = False,
) -> Path:
    """Return the local directory of a checkpoint; download it from the hub if necessary.

    A download fetches only safetensors, configs and tokenizer files. It goes to the cache of
    huggingface_hub, and files that are already there are not fetched again.

    Args:
      source: a local directory, or a hub id.
      revision: branch, tag or commit of the hub repository.
      token: access token for the hub.
      offline: whether to look in the cache only.
      configs_only: whether to fetch no weights and no tokenizer.

    Raises:
      CheckpointError: there is no such directory or repository, or the hub does not deliver it.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{source} is a file; expected a checkpoint directory or a hub id")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(source)):
        raise CheckpointError(
            f"{source} does not exist; expected a checkpoint directory or a hub id"
        )
    files = [QUANTIZATION_FILE, *CONFIG_FILES]
    if not configs_only:
        files += [_WEIGHTS, _INDEX, ADAPTER_FILE, *TOKENIZER_FILES]
    return _snapshot(str(source), revision, token, offline, files)


def _snapshot(
    repo: str, revision: str | None, token: str | None, offline: bool, files: list[str]
) -> Path:
    import huggingface_hub as hub  # the import takes a second, and most runs need no hub
    from huggingface_hub import errors

    try:
        return Path(
            hub.snapshot_download(
                repo,
                revision=revision,
                token=token,
                local_files_only=offline,
                allow_patterns=files,
            )
        )
    except errors.GatedRepoError:
        message = "is gated: accept its terms on its page and pass a token that may read it"
    except errors.RevisionNotFoundError:
        message = f"has no revision {revision!r}"
    except errors.RepositoryNotFoundError:
        message = "is neither a directory here nor a repository on the hub that this token may read"
    except errors.LocalEntryNotFoundError:
        message = "is neither a directory here nor in the local hub cache, and " + (
            "offline mode is on"
            if offline or hub.constants.HF_HUB_OFFLINE
            else "the hub cannot be reached"
        )
    except Exception as error:  # the HTTP client has errors of its own, for connections that break
        message = f"cannot be had from the hub: {_first_line(error)}"
    raise CheckpointError(f"{repo} {message}")


# --- reading -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HFCheckpoint:
    """An opened Hugging Face directory, with parsed configs and checked file headers.

    Attributes:
      quantization: the parsed hf_quant_config.json, which ModelOpt writes; None if there is none.
      self_described: whether the file says itself how each tensor is quantised, as GGUF does.
    """

    directory: Path
    config: dict[str, Any]
    generation_config: dict[str, Any] | None
    tensors: dict[str, StoredTensor]
    quantization: dict[str, Any] | None = None
    self_described: bool = False

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        """Read one tensor, and cast it to `dtype` if one is given.

        A cast works slab by slab, so that memory never holds a second copy of the whole tensor.
        """
        tensor = self.tensors[name]
        out = np.empty(tensor.shape, dtype or DTYPES[tensor.dtype])
        flat, start = out.reshape(-1), 0
        if out.dtype == DTYPES[tensor.dtype]:
            _read_whole(tensor, flat.view(np.uint8))
            return out
        for slab in self.slabs(name):
            flat[start : start + slab.size] = slab
            start += slab.size
        return out

    def slabs(self, name: str) -> Iterator[np.ndarray]:
        """Yield the values of a tensor in order, in flat pieces. All pieces share one buffer."""
        tensor = self.tensors[name]
        buffer = np.empty(min(tensor.nbytes, _SLAB_BYTES), np.uint8)
        with _bytes_of(tensor) as read_into:
            for start in range(0, tensor.nbytes, _SLAB_BYTES):
                piece = buffer[: tensor.nbytes - start]
                read_into(piece)
                yield piece.view(DTYPES[tensor.dtype])

    def equal(self, first: str, second: str) -> bool:
        """Return whether two tensors are equal bit for bit."""
        return equal(self, first, self, second)


def equal(one: HFCheckpoint, name: str, other: HFCheckpoint, its_name: str) -> bool:
    """Return whether two tensors, each of a checkpoint, are equal bit for bit."""
    a, b = one.tensors[name], other.tensors[its_name]
    return (a.shape, a.dtype) == (b.shape, b.dtype) and all(
        np.array_equal(x.view(np.uint8), y.view(np.uint8))
        for x, y in zip(one.slabs(name), other.slabs(its_name), strict=True)
    )


def open_checkpoint(directory: Path) -> HFCheckpoint:
    """Open a Hugging Face directory. Read its configs and the headers of its weights, no tensors.

    Raises:
      CheckpointError: the directory is no checkpoint, or a file is missing, truncated or corrupt.
    """
    _refuse_adapter(directory)
    gguf = _gguf_file(directory)
    if not _is_file(directory / "config.json"):
        beside = (
            ""
            if gguf is None
            else (f". Put config.json and the tokenizer's files of the model beside {gguf.name}")
        )
        raise CheckpointError(f"{directory} is not a model: it has no config.json{beside}")
    config = read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    tensors: dict[str, StoredTensor] = {} if gguf is None else read_gguf(gguf)
    for file, indexed in _weight_files(directory).items() if gguf is None else ():
        held = read_header(file)
        if indexed is not None and (absent := sorted(set(indexed) - set(held))):
            raise CheckpointError(
                f"{file} lacks {len(absent)} tensors that {_INDEX} says it holds: {listed(absent)}"
            )
        if twice := sorted(set(held) & set(tensors)):
            raise CheckpointError(f"{file} repeats tensors of another shard: {listed(twice)}")
        tensors |= held
    plain = unwrapped(tensors, str(directory))
    made_by = directory / QUANTIZATION_FILE
    return HFCheckpoint(
        directory,
        config,
        read_json(generation) if _is_file(generation) else None,
        {plain[name]: tensor for name, tensor in tensors.items()},
        read_json(made_by) if _is_file(made_by) else None,
        self_described=gguf is not None,
    )


def _refuse_adapter(directory: Path) -> None:
    """Refuse an adapter, alone or beside a whole model. transformers would apply it, and we do not."""
    if not _is_file(directory / ADAPTER_FILE):
        return
    base = read_json(directory / ADAPTER_FILE).get("base_model_name_or_path")
    way_out = (
        f"merge it with peft, `PeftModel.from_pretrained(base, {str(directory)!r}).merge_and_unload()."
        "save_pretrained(...)`, and give the merged model"
    )
    if any(directory.glob(_WEIGHTS)):
        raise CheckpointError(
            f"{directory} holds a whole model and an adapter of {base!r} ({ADAPTER_FILE}), which is not applied: "
            f"{way_out}. If it is merged already, remove the adapter's files"
        )
    raise CheckpointError(f"{directory} is an adapter (LoRA) of {base!r}, no model: {way_out}")


def note_unread(checkpoint: HFCheckpoint) -> None:
    """Name the files of weights in a directory that are not read, because others are."""
    if not (read := {tensor.file.name for tensor in checkpoint.tensors.values()}):
        return
    kinds = ("*.safetensors", "pytorch_model*.bin", "*.gguf")
    others = {file.name for kind in kinds for file in checkpoint.directory.glob(kind)} - read
    if others := sorted(name for name in others if "mmproj" not in name):
        _LOG.warning(
            "%s: %s is read, and not %s beside it; remove what is old",
            checkpoint.directory,
            listed(sorted(read)),
            listed(others),
        )


def _gguf_file(directory: Path) -> Path | None:
    """Return the GGUF file that holds the weights of a directory; None if safetensors do.

    Raises:
      CheckpointError: there are several.
    """
    # The vision tower has a file of its own.
    files = [file for file in sorted(directory.glob("*.gguf")) if "mmproj" not in file.name]
    if any(directory.glob(_WEIGHTS)):
        return None
    if len(files) > 1:
        raise CheckpointError(
            f"{directory} holds several GGUF files ({listed(file.name for file in files)}); leave one"
        )
    return files[0] if files else None


def _weight_files(directory: Path) -> dict[Path, list[str] | None]:
    """Return the safetensors files, each with the tensors that the index lists for it.

    The list is None where the directory has a single file and no index.
    """
    index, single = directory / _INDEX, directory / _SINGLE
    if not _is_file(index):
        if not _is_file(single):
            raise CheckpointError(
                f"{directory} is not a model: it has no {_SINGLE} and no {_INDEX}"
            )
        return {single: None}
    names = read_json(index).get("weight_map")
    if (
        not isinstance(names, dict)
        or not names
        or not all(isinstance(f, str) for f in names.values())
    ):
        raise CheckpointError(f"{index} is corrupt: it has no weight_map from tensors to files")
    if _is_file(single) and _SINGLE not in names.values():
        # `save_pretrained` leaves the index of an earlier, larger save. transformers takes the single file too.
        return {single: None}
    files: dict[Path, list[str]] = {}
    for name, file in names.items():
        if Path(file).name != file:
            raise CheckpointError(
                f"{index} is corrupt: for {listed([name])} it names {listed([repr(file)])}, which is "
                "not a file beside it"
            )
        files.setdefault(directory / file, []).append(name)
    if absent := sorted(f.name for f in files if not _is_file(f)):
        raise CheckpointError(f"{directory} lacks files that {_INDEX} names: {listed(absent)}")
    return {**files}


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long, say
        return False


def _read_whole(tensor: StoredTensor, into: np.ndarray) -> None:
    """Read all bytes of a tensor, a large one in several threads.

    One thread copies 2.3 GB/s out of memory on the host of an H200: it waits for fresh pages.
    """

    def read(start: int) -> None:
        with _bytes_of(tensor, start) as read_into:
            read_into(into[start : start + _SLAB_BYTES])

    starts = range(0, tensor.nbytes, _SLAB_BYTES)
    if len(starts) < 2:
        for start in starts:
            read(start)
        return
    with ThreadPoolExecutor(min(_READERS, len(starts))) as pool:
        list(pool.map(read, starts))


@contextlib.contextmanager
def _bytes_of(tensor: StoredTensor, start: int = 0) -> Iterator[Callable[[np.ndarray], None]]:
    """Open the file of a tensor, and yield a function that reads bytes into an array.

    Args:
      start: the first of its bytes to read. Each call reads those that follow.
    """

    def read_into(array: np.ndarray) -> None:
        left = array.view(np.uint8).data
        while left:
            count = file.readinto(left)
            if not count:
                raise CheckpointError(f"{tensor.file} is truncated: it ended while it was read")
            left = left[count:]

    try:
        with tensor.file.open("rb", buffering=0) as file:
            file.seek(tensor.offset + start)
            yield read_into
    except OSError as error:
        raise CheckpointError(f"{tensor.file} cannot be read: {error.strerror}") from None


# --- writing -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Tensors that one call makes together from one parameter."""

    specs: Mapping[str, TensorSpec]
    make: Callable[[], Sequence[np.ndarray]]

    @property
    def nbytes(self) -> int:
        return sum(nbytes_of(spec) for spec in self.specs.values())


def write_tensors(
    directory: Path,
    groups: Sequence[Group],
    progress: Callable[[str, int, int], None] | None = None,
    *,
    shard_bytes: int = _SHARD_BYTES,
) -> int:
    """Write tensors as model.safetensors, or as shards with an index. Return their total bytes.

    Groups are made and written in order, one at a time.

    Args:
      directory: where to write the files.
      groups: the tensors.
      progress: called after each tensor with its name, the bytes written so far, and all bytes.
      shard_bytes: largest size of a shard. A group larger than this gets a shard of its own.
    """
    shards: list[list[Group]] = [[]]
    for group in groups:
        if shards[-1] and sum(g.nbytes for g in shards[-1]) + group.nbytes > shard_bytes:
            shards.append([])
        shards[-1].append(group)
    total, done = sum(g.nbytes for g in groups), 0
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = _SINGLE if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        with (directory / file).open("wb") as opened:
            opened.write(_header(shard))
            for group in shard:
                for (name, spec), array in zip(group.specs.items(), group.make(), strict=True):
                    assert array.shape == spec.shape, (name, array.shape, spec.shape)
                    values = np.ascontiguousarray(array.astype(DTYPES[spec.dtype], copy=False))
                    opened.write(values.reshape(-1).view(np.uint8).data)
                    weight_map[name] = file
                    done += values.nbytes
                    if progress is not None:
                        progress(name, done, total)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return total


def _header(groups: Iterable[Group]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    end = 0
    for group in groups:
        for name, spec in group.specs.items():
            start, end = end, end + nbytes_of(spec)
            entries[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [start, end]}
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


def numpy_dtype(name: str) -> np.dtype:
    """Return the numpy dtype named "float32" or "bfloat16"."""
    return DTYPES[{"float32": "F32", "bfloat16": "BF16"}[name]]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
