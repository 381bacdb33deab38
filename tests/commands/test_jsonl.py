"""Lines of a prompts file: what they may say, how it reaches their rows, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

from jaxspec.commands.generate.prompts import FIELDS, PromptError, read_jsonl, read_line
from jaxspec.commands.output import json_lines, write_line
from jaxspec.options import Sampling
from tests.commands.conftest import Run

DOCS = Path(__file__).parents[2] / "docs/command-line.md"


def test_a_line_says_what_it_wants_for_itself() -> None:
    line_values = {
        "prompt": "a",
        "id": "first",
        "seed": 2**32 - 1,
        "max_new_tokens": 7,
        "stop": "b",
        "temperature": 1,
        "top_k": 5,
        "logprobs": True,
        "logit_bias": {"7": -2, "8": "-inf"},
        "label": {"any": [1, None]},
        "target": "b",
    }
    read = read_line("here", json.dumps(line_values))
    assert (read.text, read.id, read.seed, read.max_new_tokens, read.stop) == (
        "a",
        "first",
        2**32 - 1,
        7,
        ("b",),
    )
    biases = {7: -2.0, 8: -math.inf}
    assert read.sampling == {"temperature": 1, "top_k": 5, "logprobs": True, "logit_bias": biases}
    assert read.extra == {"label": {"any": [1, None]}, "target": "b"}


def test_a_prompt_is_text_ids_or_messages() -> None:
    assert read_line("", '{"prompt": [2, 5]}').ids == (2, 5)
    assert read_line("", '{"prompt_ids": [2, 5]}').ids == (2, 5)
    assert read_line("", '{"messages": [{"role": "user"}]}').messages == ({"role": "user"},)


def test_null_says_what_leaving_it_out_says() -> None:
    """Tables that are written as JSON lines have every column in every line."""
    nothing = dict.fromkeys(set(FIELDS) - {"prompt"})
    assert read_line("", json.dumps({**nothing, "prompt": "a"})) == read_line("", '{"prompt": "a"}')


REFUSED = [
    ('["a"]', "expected an object with one of prompt, prompt_ids, messages"),
    ('{"text": "a"}', "this one has none of them"),
    ('{"prompt": "a", "prompt_ids": [2]}', "this one has prompt and prompt_ids"),
    ('{"prompt": 5}', "prompt is 5; expected text, or a list of token ids"),
    ('{"prompt_ids": [2, true]}', "true is no id; expected 0 to 2147483647"),
    ('{"prompt_ids": [2, 5.0]}', "5.0 is no id"),
    ('{"prompt": [2, 4294967298]}', "4294967298 is no id"),
    ('{"prompt_ids": [-1]}', "-1 is no id"),
    ('{"messages": []}', "messages is []; expected a list of objects"),
    ('{"prompt": "a", "prompt": "b"}', '"prompt" is there twice'),
    ('{"prompt": "a", "x": {"y": 1, "y": 2}}', '"y" is there twice'),
    ('{"prompt": "a", "temperature": NaN}', "temperature has NaN, which is no JSON"),
    ('{"prompt": "a", "x": -Infinity}', "x has -Infinity, which is no JSON"),
    ('{"prompt": "a", "x": 1e999}', "x has 1e999, which is beyond the largest number"),
    ('{"prompt": "a", "top_p": -1e400}', "top_p has -1e400, which is beyond"),
    ('{"prompt": "a", "seed": 1e400}', "seed has 1e400, which is beyond"),
    ('{"prompt_ids": [[2], [3, 1e400]]}', "prompt_ids has 1e400, which is beyond"),
    ('{"prompt": "a", "logit_bias": {"7": 1e400}}', "logit_bias has 1e400, which is beyond"),
    ('{"prompt": "a", "temperature": 1' + "0" * 400 + "}", "beyond the largest number"),
    ('{"prompt": "a", "temperature": -1}', "temperature is -1; it must be from 0 to 1e6"),
    ('{"prompt": "a", "temperature": "1"}', 'temperature is "1"; expected a number'),
    ('{"prompt": "a", "temperature": true}', "temperature is true; expected a number"),
    ('{"prompt": "a", "top_p": 0}', "top_p is 0; it must be in (0, 1]"),
    ('{"prompt": "a", "top_k": 1.5}', "top_k is 1.5; expected a whole number"),
    ('{"prompt": "a", "top_k": 4294967296}', "the largest is 2147483647"),
    ('{"prompt": "a", "logprobs": 1}', "logprobs is 1; expected true or false"),
    ('{"prompt": "a", "logit_bias": {"x": 1}}', "expected token ids"),
    ('{"prompt": "a", "logit_bias": {"7": 1, "07": 2}}', "one token is there twice"),
    ('{"prompt": "a", "logit_bias": {"7": "inf"}}', 'logit_bias of 7 is "inf"; expected a number'),
    (
        '{"prompt": "a", "seed": 4294967296}',
        "seed is 4294967296; expected a whole number, from 0 to",
    ),
    ('{"prompt": "a", "seed": -1}', "seed is -1"),
    ('{"prompt": "a", "seed": 1.0}', "seed is 1.0"),
    ('{"prompt": "a", "max_new_tokens": 0}', "max_new_tokens is 0; it must be 1 or more"),
    ('{"prompt": "a", "max_new_tokens": true}', "max_new_tokens is true; expected a whole number"),
    ('{"prompt": "a", "stop": [""]}', 'stop is [""]; expected some text'),
    ('{"prompt": "a", "id": 1.5}', "id is 1.5; expected text or a whole number"),
    ('{"prompt": "a", "Temprature": 1}', '"Temprature" is not known; is it "temperature"?'),
    ('{"prompt": "a", "top-p": 1}', 'is it "top_p"?'),
    ('{"prompt": "a", "max_tokens": 1}', 'is it "max_new_tokens"?'),
    ('{"prompt": "a", "max_completion_tokens": 1}', 'is it "max_new_tokens"?'),
    ('{"prompt": "a", "num_samples": 2}', "is the same for all lines; give it as --num-samples"),
    ('{"prompt": "a", "stop_ids": [2]}', "give it as --stop-id"),
    ('{"prompt": "a", "x": ' + "[" * 70 + "]" * 70 + "}", "nested more than 64 deep"),
    ('{"prompt": "a", "x": ' + "[" * 9999 + "]" * 9999 + "}", "nested more than 64 deep"),
    ("9" * 5000, "not JSON"),
]


@pytest.mark.parametrize(("line", "message"), REFUSED, ids=[line[:50] for line, _ in REFUSED])
def test_lines_that_cannot_be_meant_are_refused(line: str, message: str) -> None:
    with pytest.raises(PromptError, match=re.escape(message)) as refused:
        read_line("file:3", line)
    assert str(refused.value).startswith("file:3: ")


def test_a_file_that_windows_wrote_is_read(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r\n')
    assert [prompt.text for prompt in read_jsonl(file)] == ["a", "b"]
    assert [prompt.origin for prompt in read_jsonl(file)] == [f"{file}:1", f"{file}:3"]


def test_every_line_has_its_own_way(generate: Run, tmp_path: Path) -> None:
    """Lines that differ in all that they can, in two orders: a line with a seed gives the same in both."""
    file = tmp_path / "prompts.jsonl"
    lines: list[dict[str, Any]] = [
        {"prompt": "the ab", "id": "x", "split": "test"},
        {"prompt": [2, 263], "temperature": 1.0, "seed": 7, "top_logprobs": 1, "id": 3, "stop": []},
        {"prompt": "the ab", "repetition_penalty": 1.5, "logit_bias": {"265": 50}},
        {"prompt": "the ab", "temperature": 1.0},
        {"prompt": "the ab", "max_new_tokens": 5, "logprobs": False},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    rows = generate("--prompts", str(file), "--json", "-", "--seed", "1").rows
    assert [row["index"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row.get("id") for row in rows] == ["x", 3, None, None, None]
    assert [row["seed"] for row in rows] == [1, 7, 1, 1, 1]
    assert [row.get("extra") for row in rows] == [{"split": "test"}, None, None, None, None]
    assert ["logprobs" in row for row in rows] == [False, True, False, False, False]
    assert {len(best) for best in rows[1]["top_logprobs"]} == {1}
    greedy, sampled, biased, other, short = (row["token_ids"] for row in rows)
    assert (len(greedy), short) == (12, greedy[:5])
    assert set(biased) == {265}
    assert other != greedy

    whole = rows[0]["text"]
    lines += [
        {"prompt": "the ab", "stop": whole[3:5]},
        {"prompt": "the ab", "stop": []},
        {"prompt": "the ab", "logit_bias": {str(greedy[0]): "-inf"}},
    ]
    file.write_text("\n".join(map(json.dumps, reversed(lines))))
    rows = generate("--prompts", str(file), "--json", "-", "--seed", "1", "--stop", whole[1:3]).rows
    first, seeded, _, unseeded, *_ = rows[::-1]
    assert first["text"] == whole[: whole.index(whole[1:3])]
    assert seeded["token_ids"] == sampled[: len(seeded["token_ids"])]  # wherever the line stands
    assert (
        unseeded["token_ids"] != other[: len(unseeded["token_ids"])]
    )  # the run's seed goes with the place
    banned, unstopped, stopped = rows[:3]
    assert stopped["text"] == whole[: whole.index(whole[3:5])]
    assert (unstopped["text"], unstopped["finish_reason"]) == (whole, "length")
    assert greedy[0] not in banned["token_ids"]


def test_logprobs_of_a_line_need_a_place(generate: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "a", "logprobs": true}')
    done = generate("--prompts", str(file))
    assert done.code == 2
    assert f"{file}:2: logprobs needs --json" in done.stderr


def test_the_page_says_what_a_line_may_say() -> None:
    """The table of the docs has every field, and no other."""
    text = DOCS.read_text(encoding="utf-8")
    (section,) = re.findall(r"^### A line of a prompts file.*?(?=^##)", text, re.M | re.S)
    named = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`[^|]+) \|", section, re.M))))
    assert named == set(FIELDS)
    assert {f.name for f in dataclasses.fields(Sampling)} <= named


def test_a_pipe_of_the_shell_gets_lines() -> None:
    """`--json >(gzip)` names a descriptor, whose link leads to nothing that has a path."""
    read, write = os.pipe()
    with json_lines(f"/dev/fd/{write}") as file:
        write_line(file, {"a": 1})
    os.close(write)
    with open(read, encoding="utf-8") as lines:
        assert [json.loads(line) for line in lines] == [{"a": 1}]
