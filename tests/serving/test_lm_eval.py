"""lm-eval asks a server for a task of its own, and gets the numbers of our own evaluation.

It is heavy, so it is no dependency. JAXSPEC_LM_EVAL names a Python that has `lm-eval[api]`; by
default this one has to.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxspec
from jaxspec.api import BUNDLED
from jaxspec.configs.base import GenerationDefaults
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Completion, Request
from jaxspec.options import ProgramFeatures
from jaxspec.rollout.scoring import Sequences, score
from jaxspec.serving.parse_request import ServingModel
from jaxspec.serving.prompt_logprobs import PromptScorer
from jaxspec.serving.settings import Settings
from jaxspec.tokenizer import completed_text, stop_at_text
from tests.serving.conftest import Live, run_server

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("JAXSPEC_LM_EVAL")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PYTHON is None and importlib.util.find_spec("lm_eval") is None,
        reason="needs lm-eval[api], or JAXSPEC_LM_EVAL=/path/to/a/python that has it",
    ),
]
FEATURES = ProgramFeatures(logprobs=True, top_logprobs=1)
NEW_TOKENS = 32  # as in held_out_text.yaml


@pytest.fixture(scope="module")
def bundled() -> Iterator[Live]:
    pair = jaxspec.load()
    engine = Engine(
        *pair, batch_size=4, cache_length=256, num_stop_ids=4, program_features=FEATURES
    )
    serving_model = ServingModel(
        names=("bundled",),
        tokenizer=pair.tokenizer,
        spec=engine.spec,
        generation=pair.target.generation or GenerationDefaults(),
        cache_length=256,
        settings=Settings(),
    )
    yield from run_server(serving_model, engine, PromptScorer(pair.target, 1))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the documents of the example."""
    folder = tmp_path_factory.mktemp("lm_eval")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    script = ROOT / "examples/lm_eval/make_data.py"
    subprocess.run([sys.executable, str(script)], cwd=folder, env=environment, check=True)
    return folder


def lm_eval(
    live: Live, folder: Path, model: str, path: str, task: str, *more: str, **args: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run a task, and return its numbers and its results for each document."""
    model_args = {
        "model": "bundled",
        "base_url": f"{live.client.base_url}/v1/{path}".replace("//v1", "/v1"),
        "tokenizer": BUNDLED / "target",
        "tokenizer_backend": "huggingface",
        "add_bos_token": True,
        **args,
    }
    out = folder / f"results-{len(list(folder.iterdir()))}"
    command = [PYTHON or sys.executable, "-m", "lm_eval", "--model", model, "--tasks", task]
    command += ["--include_path", str(ROOT / "examples/lm_eval"), "--log_samples", *more]
    command += ["--model_args", ",".join(f"{k}={v}" for k, v in model_args.items())]
    environment = {
        **{k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "cache"),
    }
    ran = subprocess.run(
        [*command, "--output_path", str(out)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    (results,) = out.rglob("results_*.json")
    (samples,) = out.rglob("samples_*.jsonl")
    lines = map(json.loads, samples.read_text().splitlines())
    return json.loads(results.read_text())["results"][task], sorted(
        lines, key=lambda s: s["doc_id"]
    )


def scored_by_us(documents: list[dict[str, Any]]) -> list[list[tuple[float, bool]]]:
    """Return the log-probability of each document's choices, and whether they are greedy."""
    pair = jaxspec.load()
    tokenizer = pair.tokenizer
    results = []
    for document in documents:
        # As lm-eval does: white space at the end of a context counts as the choice's.
        prompt = tokenizer.encode(document["before"].rstrip())
        texts = [tokenizer.encode(document["before"] + choice) for choice in document["choices"]]
        width = 128
        tokens = np.zeros((len(texts), width), np.int32)
        # A choice begins behind so many tokens. Indentation may share one with what is before it.
        # Then lm-eval counts it like this, too.
        for row, ids in enumerate(texts):
            tokens[row, : len(ids)] = ids
        sequences = Sequences.padded(tokens, [len(prompt)] * len(texts), [*map(len, texts)])
        scores = score(pair.target, pair.target.params, sequences, program_features=FEATURES)
        top_ids = np.asarray(scores.top_ids)  # pyright: ignore[reportArgumentType]
        is_best = top_ids[..., 0] == tokens
        total = np.asarray(scores.target).sum(axis=1)
        rows = enumerate(texts)
        greedy = [bool(is_best[row, len(prompt) : len(ids)].all()) for row, ids in rows]
        results.append(list(zip(total.tolist(), greedy, strict=True)))
    return results


def test_log_probabilities_are_our_own(bundled: Live, data: Path) -> None:
    """Four choices a document, in batches of token ids, three of them at a time."""
    options = ("--batch_size", "4")
    numbers, samples = lm_eval(
        bundled, data, "local-completions", "completions", "held_out", *options, num_concurrent=3
    )
    documents = [sample["doc"] for sample in samples]
    assert len(documents) == 16
    ours = scored_by_us(documents)
    for sample, rows in zip(samples, ours, strict=True):
        # Sums of some twenty numbers that float32 rounds by 3e-5 at most.
        theirs = [float(x) for x, _ in sample["filtered_resps"]]
        np.testing.assert_allclose(theirs, [x for x, _ in rows], atol=1e-3)
        assert [g == "True" for _, g in sample["filtered_resps"]] == [g for _, g in rows]
    right = [
        np.argmax([x for x, _ in rows]) == d["answer"]
        for rows, d in zip(ours, documents, strict=True)
    ]
    assert numbers["acc,none"] == pytest.approx(np.mean(right))
    assert 0.25 < numbers["acc,none"] < 1


def continued_by_us(prompts: list[tuple[int, ...]]) -> list[str]:
    """Return the greedy text after each prompt, to the end of the line."""
    pair = jaxspec.load()
    tokenizer = pair.tokenizer
    stops = pair.target.generation.eos_token_ids if pair.target.generation else ()
    stop_at = stop_at_text(tokenizer, ["\n"])
    requests = [Request(p, NEW_TOKENS, stop_ids=stops, stop_at=stop_at) for p in prompts]
    engine = Engine.fitting(pair.target, pair.drafter, requests, batch_size=4)
    done = {e.id: e for e in engine.run(requests) if isinstance(e, Completion)}
    return [completed_text(tokenizer, done[i].token_ids, ["\n"]) for i in range(len(prompts))]


def test_generated_texts_are_our_own(bundled: Live, data: Path) -> None:
    numbers, samples = lm_eval(
        bundled, data, "local-completions", "completions", "held_out_text", num_concurrent=3
    )
    tokenizer = bundled.serving_model.tokenizer
    ours = continued_by_us([tokenizer.encode(s["doc"]["before"]) for s in samples])
    assert [s["filtered_resps"][0] for s in samples] == ours
    right = [
        s["doc"]["choices"][s["doc"]["answer"]] == o + "\n"
        for s, o in zip(samples, ours, strict=True)
    ]
    assert numbers["exact_match,none"] == pytest.approx(np.mean(right))


def test_replies_in_a_conversation_are_our_own(bundled: Live, data: Path) -> None:
    _, samples = lm_eval(
        bundled,
        data,
        "local-chat-completions",
        "chat/completions",
        "held_out_text",
        "--apply_chat_template",
        num_concurrent=3,
    )
    tokenizer = bundled.serving_model.tokenizer
    chats = [[{"role": "user", "content": s["doc"]["before"]}] for s in samples]
    ours = continued_by_us([tokenizer.apply_chat(c) for c in chats])
    assert [s["filtered_resps"][0] for s in samples] == ours
