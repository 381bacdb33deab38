"""`--dry-run` counts what a real run has, and reads no weights."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import pytest

import jaxspec
from checkpoints_convert import hf_io
from jaxspec.api import BUNDLED
from jaxspec.commands.dry_run import Plan
from jaxspec.engine.engine import Engine
from jaxspec.weights import loading
from jaxspec.weights.sharding import make_mesh
from tests.commands.conftest import Run


def nbytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("drafter", "formats"),
    [
        ("dflash", {}),
        ("mtp", {"quantize": "int8", "quantize_head": "int4", "quantize_drafter": "int8"}),
        ("dflash", {"quantize_draft_head": "int8", "dtype": "bfloat16", "kv_dtype": "fp8"}),
    ],
)
def test_it_counts_the_bytes_of_a_real_engine(drafter: str, formats: dict[str, Any]) -> None:
    target, draft = jaxspec.load(drafter=drafter, **formats)
    engine = Engine(target, draft, batch_size=3, cache_length=640)
    state = engine.runtime.init_state(4)
    shapes = jaxspec.load(drafter=drafter, **formats, read_weights=False)
    assert shapes.drafter is not None
    assert shapes.target.model_def == target.model_def
    assert shapes.drafter.model_def == draft.model_def
    spec = jaxspec.runtime.runtime.make_spec(*shapes)
    counted = Plan(spec, engine.mesh, 3, 640).footprint(3, 640)
    assert counted.weights == nbytes((target.params, draft.params))
    assert counted.caches == nbytes((state.caches, state.drafter))


@pytest.mark.parametrize(
    "args",
    [
        ["generate", "a text", "--cache-length", "640", "--batch-size", "3"],
        ["bench", "--batch-size", "3", "--prompt-length", "16", "--new-tokens", "8"],
        ["bench", "--random-weights", "e2b", "--trace", "generated", "--slots", "3"],
    ],
)
def test_the_numbers_as_json(invoke: Run, args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_io.HFCheckpoint, "read", None)
    outcome = invoke(*args, "--json", "-", "--dry-run")
    assert outcome.code == 0, outcome.stderr
    values = json.loads(outcome.stdout)["dry_run"]
    assert values["rows"] == 3
    parts = dict(values["bytes_a_device"])
    assert parts.pop("total") == sum(parts.values())
    assert [d["device"] for d in values["fits"][1:]] == ["24 GB", "48 GB", "80 GB", "141 GB"]
    for device in values["fits"]:
        rows = list(device["rows_by_length"].values())
        assert rows == sorted(rows, reverse=True)
    assert "Rows that fit" in outcome.stderr


def test_the_server_starts_nothing(invoke: Run) -> None:
    outcome = invoke("serve", "--dry-run", "--slots", "4", "--cache-length", "640")
    assert outcome.code == 0, outcome.stderr
    assert "This run: 4 rows of 640 positions" in outcome.stdout


def test_it_refuses_what_a_run_refuses(invoke: Run, tmp_path: Path) -> None:
    outcome = invoke("generate", "a", "--dry-run", "--cache-length", "99999999")
    assert outcome.code == 2
    assert "cache_length" in outcome.stderr.replace("--cache-length", "cache_length")
    outcome = invoke("serve", "--dry-run", "--prefix-gib", "0", "--prefix-host-gib", "1")
    assert outcome.code == 2
    assert "--prefix-host-gib" in outcome.stderr
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    outcome = invoke("generate", "a", "--dry-run", "--json", str(rows))
    assert outcome.code == 2
    assert rows.read_text() == "{}\n"


def test_it_reads_prompts_and_looks_for_the_tokenizer(invoke: Run, tmp_path: Path) -> None:
    """Missing files of prompts were not refused, and each row had 4096 positions."""
    dry = ("generate", "--dry-run", "--max-new-tokens", "50")
    outcome = invoke(*dry, "--prompts", str(tmp_path / "none.jsonl"))
    assert outcome.code == 2
    assert "none.jsonl" in outcome.stderr
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt": "a"}\n{"prompt_ids": [5, 6], "max_new_tokens": 300}\n')
    outcome = invoke(*dry, "--prompts", str(lines), "--json", "-")
    assert outcome.code == 0, outcome.stderr
    values = json.loads(outcome.stdout)["dry_run"]
    assert (values["rows"], values["cache_length"]) == (2, 384)
    outcome = invoke(*dry, "a", "--max-new-tokens", "999999")
    assert outcome.code == 2
    assert "--max-new-tokens" in outcome.stderr
    target = tmp_path / "target"
    shutil.copytree(BUNDLED / "target", target, ignore=shutil.ignore_patterns("tokenizer*"))
    for args in ((*dry, "a", "--target", str(target)), ("serve", str(target), "--dry-run")):
        outcome = invoke(*args)
        assert outcome.code == 2
        assert "tokenizer.json" in outcome.stderr


def test_stored_prefixes_are_counted(invoke: Run) -> None:
    """Without `--prefix-gib` the store of `serve` was not."""
    for args in (("serve",), ("generate", "a")):
        outcome = invoke(*args, "--dry-run", "--prefix-gib", "0.000001")
        assert outcome.code == 2
        assert "holds no prefix of a whole slot" in outcome.stderr
    outcome = invoke("serve", "--dry-run", "--prefix-gib", "7")
    assert re.search(r"prefixes +│ 7.0 ", outcome.stdout), outcome.stdout
    assert "prefixes" not in invoke("serve", "--dry-run", "--prefix-gib", "0").stdout
    assert "prefixes" in invoke("serve", "--dry-run").stdout


def test_pages_are_counted_or_refused(invoke: Run) -> None:
    dry = ("serve", "--dry-run", "--cache-length", "512", "--cache-tokens")
    outcome = invoke(*dry, "640")
    assert outcome.code == 0, outcome.stderr
    assert "in pages for 640 tokens" in outcome.stdout
    for wrong, message in (
        (("511",), "--cache-tokens 511 holds no whole request"),
        (("none",), "give a number of tokens, or auto"),
    ):
        outcome = invoke(*dry, *wrong)
        assert outcome.code == 2
        assert message in re.sub(r"\s+", " ", outcome.stderr)


def test_the_most_rows_are_found_whatever_their_number() -> None:
    """The search ended at 1,024."""
    spec = jaxspec.runtime.runtime.make_spec(*jaxspec.load(drafter="none", read_weights=False))
    plan = Plan(spec, make_mesh(devices=jax.devices()[:1]), 1, 640)
    (limit, too_much) = (plan.footprint(rows, 640).total for rows in (5000, 5001))
    assert limit < too_much
    assert plan.most_rows(limit, [640]) == {"640": 5000}
    assert plan.most_rows(1, [640]) == {"640": 0}


def test_of_a_hub_id_only_configs_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build that is quantised tells its formats in config.json."""
    shutil.copy(BUNDLED / "target" / "config.json", tmp_path)
    fetched: list[str] = []

    def snapshot(repo: str, *options: Any) -> Path:
        fetched.extend(options[-1])
        return tmp_path

    monkeypatch.setattr(hf_io, "_snapshot", snapshot)
    load: Any = dict(dtype="float32", read_weights=False)
    found = loading.load_target("someone/something", **load)
    assert not [name for name in fetched if "safetensors" in name or "token" in name]
    assert found.model_def == jaxspec.load(drafter="none").target.model_def
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            }
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    formats = dict(loading.load_target("someone/something", **load).model_def.formats)
    assert set(formats.values()) == {"fp8"}
    assert len(formats) > 4
