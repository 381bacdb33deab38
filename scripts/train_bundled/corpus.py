"""The text: standard library sources of one Python version, with whole modules held out.

`manifest.txt` names every file that is used, with its sha256, in the format of `sha256sum`. The split
follows from that list and the seed alone. Files are read as UTF-8; code tables and generated files are
left out, because a small model would learn to recite them.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from scripts.train_bundled import recipe

TEST_PARTS = {"test", "tests", "idle_test"}
NOT_HELD_OUT = {"distutils", "lib2to3", "idlelib", "encodings", "turtledemo", "ensurepip", "msilib"}
HELD_OUT_BYTES = range(8_000, 60_000)  # sizes of the modules that may be held out
NUM_HELD_OUT, NUM_VALIDATION, NUM_PROMPTS, PROMPT_LENGTH = 20, 8, 16, 64
# A token never crosses these pieces: a line break with the next line's indentation, a name with the
# space before it, one digit, a run of signs, other blanks.
PIECES = r"\n+ *| ?[\p{L}_]+| ?\p{N}| ?[^\s\p{L}\p{N}_]+|\s+"


@dataclass(frozen=True)
class Split:
    """File names, relative to the standard library's directory."""

    library: list[str]
    tests: list[str]
    validation: list[str]
    held_out: list[str]


def write_manifest(stdlib: Path) -> int:
    """List the files that are fit to train on, with their hashes; return how many."""
    lines = []
    for path in sorted(stdlib.rglob("*.py")):
        name = path.relative_to(stdlib).as_posix()
        data = path.read_bytes()
        if _is_source(name, data):
            lines.append(f"{hashlib.sha256(data).hexdigest()}  {name}\n")
    recipe.MANIFEST.write_text("".join(lines))
    return len(lines)


def read_held_out(stdlib: Path) -> list[str]:
    """Read the files that bits per byte are over."""
    names = json.loads(recipe.HELD_OUT.read_text())["files"]
    return list(read_files(stdlib, names).values())


def read_files(stdlib: Path, names: Iterable[str] | None = None) -> dict[str, str]:
    """Read every file of the manifest, or those named.

    Raises:
      ValueError: a file is missing or has another hash; all of them are listed.
    """
    files, wrong = {}, []
    wanted = None if names is None else set(names)
    for digest, name in manifest():
        if wanted is not None and name not in wanted:
            continue
        path = stdlib / name
        if not path.is_file():
            wrong.append(f"{name}: missing")
        elif hashlib.sha256(data := path.read_bytes()).hexdigest() != digest:
            wrong.append(f"{name}: other contents")
        else:
            files[name] = data.decode()
    if wrong:
        raise ValueError(
            f"{stdlib} is not the standard library of Python {recipe.PYTHON}, {len(wrong)} files differ:\n  "
            + "\n  ".join(wrong[:20])
        )
    return files


def manifest() -> list[tuple[str, str]]:
    """Return hash and name of every file, in order."""
    return [tuple(line.split("  ", 1)) for line in recipe.MANIFEST.read_text().splitlines()]  # type: ignore[misc]


def split(files: dict[str, str]) -> Split:
    """Divide the files; what is held out is drawn by seed from modules of middling size."""
    tests = [name for name in files if _is_test(name)]
    library = [name for name in files if not _is_test(name)]
    eligible = [
        name
        for name in library
        if len(files[name].encode()) in HELD_OUT_BYTES and name.split("/")[0] not in NOT_HELD_OUT
    ]
    drawn = random.Random(recipe.SEED).sample(eligible, NUM_HELD_OUT + NUM_VALIDATION)
    held_out, validation = drawn[:NUM_HELD_OUT], drawn[NUM_HELD_OUT:]
    return Split(
        [n for n in library if n not in drawn], tests, sorted(validation), sorted(held_out)
    )


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """Train byte-level BPE: any text goes in and comes out unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.TARGET.vocab_size,
        special_tokens=list(recipe.SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = recipe.SPECIALS[recipe.BOS]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, recipe.BOS)]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Return one stream: <bos> text <eos> for every file."""
    stream: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        stream += [*encoding.ids, recipe.EOS]
    return np.asarray(stream, np.uint16)


def write_held_out(tokenizer: Tokenizer, files: dict[str, str], names: list[str]) -> None:
    """Store the prompts, which begin at line starts drawn by seed, and what bits per byte are over."""
    rng = random.Random(recipe.SEED + 1)
    prompts = []
    for name in rng.sample(names, NUM_PROMPTS):
        lines = files[name].splitlines(keepends=True)
        starts = [i for i, line in enumerate(lines) if line.strip()]
        while True:
            first = rng.choice(starts)
            ids = tokenizer.encode("".join(lines[first : first + 100])).ids[:PROMPT_LENGTH]
            if len(ids) == PROMPT_LENGTH:
                break
        prompts.append({"file": name, "line": first + 1, "ids": ids})
    digests = {name: digest for digest, name in manifest()}
    held_out = {
        "python": recipe.PYTHON,
        "prompts": prompts,
        "files": {n: {"sha256": digests[n], "bytes": len(files[n].encode())} for n in names},
    }
    recipe.BUNDLED.mkdir(parents=True, exist_ok=True)
    recipe.HELD_OUT.write_text(json.dumps(held_out, separators=(",", ":")) + "\n")


def _is_test(name: str) -> bool:
    return bool(TEST_PARTS & set(name.split("/")[:-1]))


def _is_source(name: str, data: bytes) -> bool:
    top = name.split("/")[0]
    if top.startswith(("site-packages", "config-", "_sysconfigdata", "pydoc_data")):
        return False  # not part of the release, or different on every machine, or prose
    if top == "encodings" and b"decoding_" in data:
        return False
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return len(data) > 200
