"""Stages of training the bundled pair; run them in order."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Annotated

import jax.numpy as jnp
import numpy as np
import typer
from rich.console import Console
from tokenizers import Tokenizer

from jaxspec.shapes import Params
from jaxspec.weights.model_def import ModelDef
from scripts.train_bundled import (
    corpus,
    drafter,
    evaluate,
    export,
    recipe,
    refine,
    target,
)

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
console = Console(highlight=False, soft_wrap=True)
Stdlib = Annotated[
    Path, typer.Option(help=f"the standard library of Python {recipe.PYTHON}", file_okay=False)
]
Work = Annotated[Path, typer.Option(help="where stages leave what the next ones read")]
Schedule = Annotated[str, typer.Option(help="smoke or full")]
Dtype = Annotated[str, typer.Option(help="of the passes: bfloat16 or float32")]
STDLIB = Path(sysconfig.get_path("stdlib"))
WORK = Path("out/bundled")
WEIGHTS = {"target": "refined.npz", "dflash": "dflash.npz", "mtp": "mtp.npz"}


@app.command("manifest")
def manifest_stage(stdlib: Stdlib = STDLIB) -> None:
    """Write manifest.txt anew: only for another Python version."""
    console.print(f"{corpus.write_manifest(stdlib)} files")


@app.command("corpus")
def corpus_stage(stdlib: Stdlib = STDLIB, work: Work = WORK) -> None:
    """Check the files, hold modules out, train the tokenizer, encode, store the prompts."""
    files = corpus.read_files(stdlib)
    parts = corpus.split(files)
    work.mkdir(parents=True, exist_ok=True)
    console.print(f"{len(files)} files; held out: {', '.join(parts.held_out)}")
    tokenizer = corpus.train_tokenizer(files[name] for name in parts.library + parts.tests)
    tokenizer.save(str(work / "tokenizer.json"), pretty=False)
    streams = {
        kind: corpus.encode(tokenizer, [files[name] for name in names])
        for kind, names in vars(parts).items()
    }
    np.savez_compressed(work / "corpus.npz", **streams)
    corpus.write_held_out(tokenizer, files, parts.held_out)
    console.print({kind: f"{len(stream)} tokens" for kind, stream in streams.items()})


@app.command("target")
def target_stage(schedule: Schedule = "full", dtype: Dtype = "bfloat16", work: Work = WORK) -> None:
    """Train the target."""
    params = target.train(
        target.target_def(dtype),
        recipe.TARGET_SCHEDULES[schedule],
        _streams(work),
        console.print,
    )
    _save(work / "target.npz", params)


@app.command("refine")
def refine_stage(schedule: Schedule = "full", dtype: Dtype = "bfloat16", work: Work = WORK) -> None:
    """Teach the target not to loop."""
    params = refine.train(
        target.target_def(dtype),
        _load(work / "target.npz"),
        recipe.REFINE_SCHEDULES[schedule],
        _streams(work),
        console.print,
    )
    _save(work / "refined.npz", params)


@app.command("drafter")
def drafter_stage(
    schedule: Schedule = "full", dtype: Dtype = "bfloat16", work: Work = WORK
) -> None:
    """Train the drafter on the target's own text."""
    params = drafter.train(
        _graphs(dtype),
        _load(work / "refined.npz"),
        recipe.DRAFTER_SCHEDULES[schedule],
        _streams(work),
        work / f"dflash-{schedule}",
        console.print,
    )
    _save(work / "dflash.npz", params)


@app.command("assistant")
def assistant_stage(
    schedule: Schedule = "full", dtype: Dtype = "bfloat16", work: Work = WORK
) -> None:
    """Train the MTP assistant on the target's own text."""
    params = drafter.train(
        (target.target_def(dtype), drafter.assistant_def(dtype)),
        _load(work / "refined.npz"),
        recipe.ASSISTANT_SCHEDULES[schedule],
        _streams(work),
        work / f"mtp-{schedule}",
        console.print,
    )
    _save(work / "mtp.npz", params)


@app.command("export")
def export_stage(work: Work = WORK, destination: Path = recipe.BUNDLED) -> None:
    """Write all three as Hugging Face directories, in bfloat16."""
    models = {
        name: target.rounded(_load(work / file), "bfloat16") for name, file in WEIGHTS.items()
    }
    export.export(destination, models, _tokenizer(work))
    files = [p for name in models for p in (destination / name).iterdir()]
    console.print(f"{sum(p.stat().st_size for p in files)} bytes in {destination}")


@app.command("evaluate")
def evaluate_stage(stdlib: Stdlib = STDLIB, dtype: Dtype = "float32", work: Work = WORK) -> None:
    """Measure the target and its drafters, weights rounded to bfloat16, on the held-out modules."""
    texts = corpus.read_held_out(stdlib)
    model_defs = {
        "target": target.target_def(dtype),
        "dflash": drafter.dflash_def(dtype),
        "mtp": drafter.assistant_def(dtype),
    }
    models = {
        name: (
            model_def,
            target.rounded(target.rounded(_load(work / WEIGHTS[name]), "bfloat16"), dtype),
        )
        for name, model_def in model_defs.items()
    }
    result = evaluate.evaluate(models, _tokenizer(work), texts)
    (work / "evaluation.json").write_text(json.dumps(result, indent=1))
    for kind in ("greedy", "temperature_1"):
        samples = result[kind].pop("samples")
        console.print(kind, result[kind])
        console.print(
            "\n".join(f"--- {i}\n{text}" for i, text in enumerate(samples[:6])), markup=False
        )
    console.print(result["bits_per_byte"])


def _graphs(dtype: str) -> tuple[ModelDef, ModelDef]:
    return target.target_def(dtype), drafter.dflash_def(dtype)


def _streams(work: Path) -> dict[str, np.ndarray]:
    with np.load(work / "corpus.npz") as file:
        return dict(file)


def _tokenizer(work: Path) -> Tokenizer:
    return Tokenizer.from_file(str(work / "tokenizer.json"))


def _save(path: Path, params: Params) -> None:
    np.savez(path, **{name: np.asarray(value, np.float32) for name, value in params.items()})  # type: ignore[arg-type]
    console.print(f"{path}: {sum(v.size for v in params.values())} parameters")


def _load(path: Path) -> Params:
    with np.load(path) as file:
        return {name: jnp.asarray(value) for name, value in file.items()}


if __name__ == "__main__":
    app()
