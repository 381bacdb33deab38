"""`jaxspec generate` on a tiny pair, in process: what it prints, where, and how it refuses."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from rich.console import Console

from jaxspec.commands import startup
from jaxspec.commands.generate import plain, requests
from jaxspec.commands.generate import run as generation
from jaxspec.commands.generate.options import DecodingOptions
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Completion, Update
from jaxspec.tokenizer import Tokenizer
from jaxspec.weights.loading import load_target
from tests import tiny_pair
from tests.commands.conftest import Run, two_processes

GENERATE = ["generate", "--target", "target", "--drafter", "drafter", "--mesh", "data=2,model=1"]
KEYS = [
    "index",
    "digest",
    "seed",
    "prompt",
    "prompt_ids",
    "token_ids",
    "text",
    "finish_reason",
    "verify_steps",
    "acceptance_lengths",
    "acceptance_length",
]


# --- output ------------------------------------------------------------------------------------------


def test_one_prompt_streams_its_text_and_ends_with_a_table(generate: Run) -> None:
    done = generate("a b")
    assert done.code == 0
    assert done.stdout == generate("a b", "--json", "-").rows[0]["text"] + "\n"
    for part in (
        "12 new",
        "3 in 1 prompt",
        "acceptance length",
        "draft token 3",
        "batch 1 · cache 64",
    ):
        assert part in done.stderr
    assert "\x1b" not in done.stdout + done.stderr  # no colours and no spinner without a terminal


def test_a_tree_of_drafts_gives_the_same_tokens(generate: Run) -> None:
    chain = generate("a b", "--json", "-")
    shape = ("--tree-topk", "2", "--tree-depth", "3", "--num-draft-tokens", "5")
    tree = generate("a b", *shape, "--json", "-")
    assert tree.rows[0]["token_ids"] == chain.rows[0]["token_ids"]
    assert tree.summary["tree"] == {"topk": 2, "depth": 3}
    assert chain.summary["tree"] is None
    assert tree.summary["num_draft_tokens"] == 5
    assert len(tree.summary["acceptance_by_position"]) == 3


def test_json_lines_say_all_and_nothing_else_is_on_stdout(generate: Run) -> None:
    done = generate("a b", "the ab", "--json", "-")
    assert [row["prompt"] for row in done.rows] == ["a b", "the ab"]
    for row in done.rows:
        assert list(row) == KEYS
        assert len(row["token_ids"]) == 12
        assert row["finish_reason"] == "length"
        assert row["verify_steps"] == len(row["acceptance_lengths"])
        assert all(1 <= length <= 4 for length in row["acceptance_lengths"])
        assert sum(row["acceptance_lengths"]) >= 11  # prefill gives one; the last step may be cut
    assert done.rows[0]["prompt_ids"] == [tiny_pair.BOS, 263, 267]
    summary = done.summary
    assert summary["prompts"] == 2
    assert summary["new_tokens"] == 24
    assert summary["decode_tokens"] == 22
    assert summary["verify_steps"] == sum(row["verify_steps"] for row in done.rows)
    lengths = [n for row in done.rows for n in row["acceptance_lengths"]]
    assert summary["acceptance_length"] == pytest.approx(sum(lengths) / len(lengths))
    assert 1 + sum(summary["acceptance_by_position"]) == pytest.approx(summary["acceptance_length"])
    assert summary["target"] == "target"
    assert summary["drafter"] == "drafter"
    assert (summary["num_draft_tokens"], summary["batch_size"], summary["cache_length"]) == (
        3,
        1,
        64,
    )
    assert (summary["dtype"], summary["platform"]) == ("float32", "cpu")
    assert (summary["drafter_dtype"], summary["choose_length"]) == ("float32", "exact")
    assert set(summary["versions"]) == {"jaxspec", "jax", "jaxlib", "python"}


def test_a_json_file_has_the_rows_and_the_summary(generate: Run, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    done = generate("a b", "--json", str(path))
    assert done.code == 0
    assert done.stdout == ""
    assert [list(json.loads(line)) for line in path.read_text().splitlines()] == [KEYS, ["summary"]]
    assert list(tmp_path.iterdir()) == [path]


def test_many_prompts_print_under_headers(generate: Run) -> None:
    done = generate("a b", "the\nab", "--prompt-ids", "2,263")
    texts = [row["text"] for row in generate("a b", "the\nab", "--json", "-").rows]
    assert done.stdout.startswith(
        f"── 1/3 ── a b\n{texts[0]}\n\n── 2/3 ── the\\nab\n{texts[1]}\n\n── 3/3"
    )


class ScriptedEngine(Engine):
    """An engine that finishes the last prompt first."""

    def run(self, requests: Any) -> Iterator[Update | Completion]:
        for request in reversed(requests):
            assert isinstance(request.id, tuple)
            token = 263 + request.id[0]
            yield Update(request.id, (token,))
            yield Completion(request.id, (token, 263), "stop", (2,))


def test_results_come_in_the_order_of_the_prompts(
    generate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "Engine", ScriptedEngine)
    done = generate("a", "b", "c", "--json", "-")
    assert [row["prompt"] for row in done.rows] == ["a", "b", "c"]
    assert [row["text"] for row in done.rows] == ["aa", "ba", "ca"]


# --- prompts -----------------------------------------------------------------------------------------


def test_standard_input_is_one_prompt_whole(generate: Run) -> None:
    done = generate("--json", "-", stdin=b"a b\nthe\n")
    assert [row["prompt"] for row in done.rows] == ["a b\nthe\n"]


def test_lines_come_from_standard_input(generate: Run) -> None:
    """It was "cannot read -"."""
    done = generate("--prompts", "-", "--json", "-", stdin=b'{"prompt": "a"}\r\n\n{"prompt": "b"}')
    assert [row["prompt"] for row in done.rows] == ["a", "b"]
    assert "error: standard input:2: not JSON" in generate("--prompts", "-", stdin=b"\n5,").stderr
    assert "standard input has no prompts" in generate("--prompts", "-", stdin=b"").stderr


def test_prompts_come_from_everywhere_in_order(generate: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "c"}\n\n{"prompt_ids": [2, 264]}\n')
    done = generate("a", "--prompts", str(file), "--prompt-ids", "2, 263", "--json", "-")
    assert [row["prompt_ids"] for row in done.rows] == [[2, 263], [2, 263], [2, 265], [2, 264]]
    assert done.rows[0]["token_ids"] == done.rows[1]["token_ids"]


def test_chat_applies_the_template(generate: Run, checkpoints: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(checkpoints / "target")
    turn = [{"role": "user", "content": "a"}]
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"messages": turn * 2}))
    done = generate("a", "--prompts", str(file), "--chat", "--json", "-")
    expected = [list(tokenizer.apply_chat(messages)) for messages in (turn, turn * 2)]
    assert [row["prompt_ids"] for row in done.rows] == expected
    assert done.rows[0]["prompt"] == "<bos><turn>ua<turn>m"
    thinking = generate(
        "a", "--chat", "--json", "-", "--chat-template-kwargs", '{"enable_thinking": 1}'
    )
    assert thinking.rows[0]["prompt"] == "<bos><turn>ua the<turn>m"


def test_ids_need_no_tokenizer(generate: Run) -> None:
    done = generate("--target", "mute", "--prompt-ids", "2,263,267", "--json", "-")
    same = generate("a b", "--json", "-").rows[0]
    digest = done.rows[0]["digest"]  # of another directory, without a tokenizer
    assert done.rows[0] == {**same, "prompt": None, "text": None, "digest": digest}
    shown = generate("--target", "mute", "--prompt-ids", "2,263,267").stdout
    assert shown == ",".join(map(str, same["token_ids"])) + "\n"


# --- decoding options --------------------------------------------------------------------------------


def test_without_a_drafter_steps_are_plain(generate: Run) -> None:
    done = generate("a b", "--drafter", "none", "--json", "-")
    assert done.rows[0]["acceptance_lengths"] == [1] * 11
    assert done.rows[0]["token_ids"] == generate("a b", "--json", "-").rows[0]["token_ids"]
    assert done.summary["drafter"] is None
    assert done.summary["num_draft_tokens"] == 0


def test_a_target_of_ones_own_runs_plain_and_says_so(invoke: Run) -> None:
    sizes = ("--max-new-tokens", "12", "--cache-length", "64")
    done = invoke("generate", "--target", "target", "a", "--json", "-", *sizes)
    assert done.summary["drafter"] is None
    assert done.stderr.startswith("note: no --drafter was given: decoding plainly")


def test_a_stop_text_ends_the_text_before_it(generate: Run) -> None:
    whole = generate("the ab", "--json", "-").rows[0]
    stop = whole["text"][3:5]
    done = generate("the ab", "--json", "-", "--stop", "not this", "--stop", stop).rows[0]
    assert done["finish_reason"] == "stop"
    assert done["text"] == whole["text"][: whole["text"].index(stop)]
    assert done["token_ids"] == whole["token_ids"][: len(done["token_ids"])]
    assert len(done["token_ids"]) < 12
    assert generate("the ab", "--stop", stop).stdout == done["text"] + "\n"


def test_a_stop_id_ends_the_tokens_with_it(generate: Run) -> None:
    whole = generate("the ab", "--json", "-").rows[0]["token_ids"]
    done = generate("the ab", "--json", "-", "--stop-id", str(whole[6])).rows[0]
    assert done["token_ids"] == whole[: whole.index(whole[6]) + 1]
    assert done["finish_reason"] == "stop"


def test_stop_ids_are_the_checkpoints_and_those_given(checkpoints: Path) -> None:
    target = load_target(str(checkpoints / "target"), dtype="float32")
    options = DecodingOptions(stop_ids=(7,))
    assert requests.stop_ids(options, target) == (tiny_pair.EOS, 7)
    assert requests.stop_ids(DecodingOptions(ignore_eos=True), target) == ()


def test_sampling_of_the_checkpoint_yields_to_flags(generate: Run) -> None:
    own = generate("a", "--sampling", "model", "--json", "-").summary
    assert (own["temperature"], own["top_k"], own["top_p"]) == (1.5, 7, 0.9)
    assert (own["min_p"], own["repetition_penalty"]) == (0.01, 1.1)
    mixed = generate(
        "a", "--sampling", "model", "--top-k", "3", "--top-p", "1", "--json", "-"
    ).summary
    assert (mixed["temperature"], mixed["top_k"], mixed["top_p"]) == (1.5, 3, 1.0)
    greedy = generate("a", "--json", "-").summary
    assert (greedy["temperature"], greedy["top_k"], greedy["top_p"]) == (0.0, 0, 1.0)


def test_a_seed_gives_each_prompt_its_own(generate: Run) -> None:
    sampled = ("a", "a", "--temperature", "1", "--json", "-")
    rows = generate(*sampled).rows
    assert rows[0]["token_ids"] != rows[1]["token_ids"]
    assert generate(*sampled).rows == rows
    assert generate(*sampled, "--seed", "1").rows != rows


def test_options_that_change_nothing_are_pointed_out(generate: Run) -> None:
    chosen = generate("a", "--top-k", "5", "--min-p", "0.1")
    assert "note: --top-k, --min-p: without effect at temperature 0" in chosen.stderr
    assert "without effect" not in generate("a", "--top-k", "5", "--temperature", "1").stderr


def test_all_that_shapes_sampling_reaches_the_tokens(generate: Run) -> None:
    """Two samples of each of two prompts, the second with an error: every value is on, in one program."""
    flags = (
        "--temperature 1 --min-p 0.05 --repetition-penalty 1.2 --presence-penalty 0.5 "
        "--frequency-penalty 0.25 --logit-bias 263=-1.5 --ban-token 264 --draft-sampling "
        "--verification block --num-samples 2 --top-logprobs 2 --json -"
    )
    biases = ("--logit-bias", '{"265": 50, "266": -Infinity}')
    done = generate("a b", "", *flags.split(), *biases)
    assert done.code == 1
    assert done.stderr.count("the prompt is empty") == 1
    assert [row["sample"] for row in done.rows] == [0, 1, 0, 1]
    assert ["error" in row for row in done.rows] == [False, False, True, True]
    first, second = done.rows[:2]
    assert list(first) == [
        *KEYS[:3],
        "sample",
        *KEYS[3:],
        "logprobs",
        "sampled_logprobs",
        "top_logprobs",
    ]
    assert first["prompt_ids"] == second["prompt_ids"]
    for row in (first, second):
        assert set(row["token_ids"]) == {265}  # the bias decides, whatever the penalties
        assert len(row["logprobs"]) == len(row["top_logprobs"]) == 12
        assert row["sampled_logprobs"] == pytest.approx([0.0] * 12, abs=1e-3)
        assert all(len(best) == 2 for best in row["top_logprobs"])
    summary = {name: done.summary[name] for name in ("prompts", "num_samples", "errors")}
    assert summary == {"prompts": 2, "num_samples": 2, "errors": 1}
    assert done.summary["prompt_tokens"] == 3
    chosen = {
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "logit_bias": {"263": -1.5, "265": 50},
        "ban_tokens": [266, 264],
        "draft_sampling": True,
        "verification": "block",
    }
    assert {name: done.summary[name] for name in chosen} == chosen


def test_samples_are_different_and_one_after_the_other(generate: Run) -> None:
    sampled = ("--temperature", "1", "--json", "-")
    rows = generate("a", "a", "b", *sampled).rows
    samples = generate("a", "b", "--num-samples", "2", *sampled).rows
    assert [row["prompt"] for row in samples] == ["a", "a", "b", "b"]
    assert [row["token_ids"] for row in samples[:3]] == [row["token_ids"] for row in rows]
    shown = generate("a", "--num-samples", "2")
    assert shown.stdout.startswith("── 1/2 ── a\n")
    assert "2 in 1 prompt, 2 samples of each" in shown.stderr


def test_a_long_run_is_compared_with_plain_decoding(
    generate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled = ("a b", "the", "a", "--temperature", "1", "--json", "-")
    short = generate(*sampled)
    assert short.summary["plain_tokens_per_s"] is None
    assert "plain" not in short.stderr
    monkeypatch.setattr(plain, "LONG_ENOUGH_S", 0)
    monkeypatch.setattr(plain, "TIMES_COMPILING", 0)
    long = generate(*sampled)
    assert long.rows == short.rows
    summary = long.summary
    assert summary["plain_tokens_per_s"] > 0
    assert summary["plain_measured_s"] > 0
    assert (
        summary["decode_tokens"] == short.summary["decode_tokens"]
    )  # the measurement's do not count
    assert f"{summary['plain_tokens_per_s']:,.1f} tok/s without the drafter" in long.stderr
    assert "(measured in" in long.stderr
    without = generate("a b", "the", "--drafter", "none", "--json", "-").summary
    assert without["plain_tokens_per_s"] is None


# --- mistakes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--target", "nowhere", "a"], "nowhere does not exist; expected a checkpoint directory"),
        (["--target", "empty", "a"], "empty is not a model: it has no config.json"),
        (["--target", "drafter", "a"], "drafter is a DFlash drafter; expected a target"),
        (["--drafter", "target", "a"], "target is a target; expected a DFlash drafter"),
        (["--drafter", "mpt", "a"], "drafter mpt is not known; expected a directory, a hub id"),
        (["--drafter", "narrow", "a"], "hidden_size: drafter 16, target 32"),
        (["--target", "assistant", "a"], "assistant is an MTP assistant; expected a target"),
        (
            ["--drafter", "other", "a"],
            "backbone_hidden_size: assistant 48, target 32; kv heads of sliding layers: assistant 2, "
            "target 1; use the assistant of the target's own size",
        ),
        (
            ["--drafter", "assistant", "a", "--num-draft-tokens", "16"],
            "this drafter proposes 1 to 15 tokens a step",
        ),
        (["--target", "mute", "a"], "mute has no tokenizer.json"),
        (["--target", "mute", "--prompt-ids", "2", "--stop", "a"], "mute has no tokenizer.json"),
        (
            ["--prompt-ids", "2,272"],
            "prompt ids [272] are outside the vocabulary; expected 0 to 271",
        ),
        (["--prompt-ids", "2,-1"], "prompt ids [-1] are outside the vocabulary"),
        (["--prompt-ids", "2,x"], "--prompt-ids 2,x: expected whole numbers with commas"),
        (["--prompt-ids", ""], "the prompt is empty"),
        ([""], "argument 1: the prompt is empty; give at least one character"),
        ([], "there is no prompt; give one as an argument, on standard input"),
        (["a" * 60], "pass --cache-length 77"),
        (["a" * 60, "--max-new-tokens", "300"], "needs 361 positions; the model has 300"),
        (["a", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["a", "--max-new-tokens", "-3"], "--max-new-tokens"),
        (
            ["a", "--temperature", "-0.5"],
            "--temperature is -0.5; it must be from 0 to 1e6; 0: greedy",
        ),
        (["a", "--temperature", "nan"], "--temperature is nan; it must be from 0 to 1e6"),
        (["a", "--top-p", "0"], "--top-p is 0; it must be in (0, 1]; 1: off"),
        (["a", "--top-p", "1.1"], "--top-p is 1.1; it must be in (0, 1]; 1: off"),
        (["a", "--min-p", "2"], "--min-p is 2; it must be in [0, 1]; 0: off"),
        (
            ["a", "--repetition-penalty", "0"],
            "--repetition-penalty is 0; it must be from 1e-6 to 1e6; 1: off",
        ),
        (
            ["a", "--presence-penalty", "inf"],
            "--presence-penalty is inf; it must be from -1e6 to 1e6; 0: off",
        ),
        (
            ["a", "--logit-bias", "5:1"],
            "--logit-bias 5:1: expected ID=VALUE, such as 17=-2.5, or JSON",
        ),
        (["a", "--logit-bias", '{"x": 1}'], "expected ID=VALUE, such as 17=-2.5, or JSON"),
        (["a", "--logit-bias", f'{{"5": 1{"0" * 400}}}'], "expected ID=VALUE, such as 17=-2.5"),
        (["a", "--chat", "--chat-template-kwargs", "[" * 100_000], "is not JSON"),
        (
            ["a", "--logit-bias", "5=inf"],
            "the bias of 5 is inf; it must be 1e6 at most, or -inf to ban",
        ),
        (
            ["a", "--logit-bias", "5=1", "--logit-bias", "5=2"],
            "--logit-bias names token 5 twice; leave one out",
        ),
        (
            ["a", "--logit-bias", "272=1"],
            "--logit-bias 272 is outside the vocabulary; expected 0 to 271",
        ),
        (["a", "--ban-token", "-1"], "--ban-token -1 is outside the vocabulary"),
        (["a", "--num-samples", "0"], "--num-samples"),
        (["a", "--distributed"], "--distributed needs --mesh"),
        (["a", "--logprobs"], "--logprobs needs --json"),
        (["a", "--top-logprobs", "2"], "--top-logprobs needs --json"),
        (
            ["a", "--top-logprobs", "300", "--json", "-"],
            "--top-logprobs is 300; the vocabulary has 272 tokens",
        ),
        (["a", "--draft-sampling", "--drafter", "none"], "--draft-sampling needs a drafter"),
        (["a", "--verification", "block", "--drafter", "none"], "--verification block needs"),
        (["a", "--verification", "all"], "--verification"),
        (
            [
                "a",
                "--verification",
                "block",
                "--tree-topk",
                "2",
                "--tree-depth",
                "3",
                "--num-draft-tokens",
                "4",
            ],
            "--verification block is for chains",
        ),
        (["a", "--top-k", "-1"], "--top-k"),
        (["a", "--num-draft-tokens", "4"], "this drafter proposes 1 to 3 tokens a step"),
        (
            ["a", "--num-draft-tokens", "2", "--drafter", "none"],
            "--num-draft-tokens needs a drafter",
        ),
        (
            ["a", "--tree-topk", "2"],
            "a tree needs --tree-topk, --tree-depth and --num-draft-tokens",
        ),
        (
            ["a", "--tree-topk", "2", "--tree-depth", "4", "--num-draft-tokens", "4"],
            "--tree-depth 4: this drafter drafts at most 3 tokens in a row",
        ),
        (
            ["a", "--tree-topk", "4", "--tree-depth", "3", "--num-draft-tokens", "3"],
            "needs at least 4 draft tokens, got 3",
        ),
        (["a", "--stop-id", "272"], "--stop-id 272 is outside the vocabulary; expected 0 to 271"),
        (["a", "--stop", ""], "--stop: expected some text"),
        (["a", "--chat-template-kwargs", "{}"], "--chat-template-kwargs needs --chat"),
        (["a", "--chat", "--chat-template-kwargs", "{"], "--chat-template-kwargs is not JSON"),
        (["a", "--chat", "--chat-template-kwargs", "[]"], "expected a JSON object"),
        (["--prompt-ids", "2", "--chat"], "token ids take no chat template"),
        (["--prompts", "none.jsonl"], "cannot read none.jsonl: No such file or directory"),
        (["a", "--json", "nowhere/out.jsonl"], "cannot write nowhere/out.jsonl: No such file"),
        (["a", "--json", "empty"], "cannot write empty: Is a directory"),
        (["a", "--compilation-cache", "target/manifest.json"], "--compilation-cache: cannot make"),
    ],
)
def test_mistakes_get_one_message(generate: Run, args: list[str], message: str) -> None:
    done = generate(*args)
    assert done.code == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": ', "not JSON"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "messages need the chat template"),
    ],
)
def test_bad_lines_are_named(generate: Run, tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n' + line)
    done = generate("--prompts", str(file), "--json", str(tmp_path / "out"))
    assert done.code == 2
    assert f"{file}:2: " in done.stderr
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == [file]


def test_input_that_is_not_text_is_refused(generate: Run, tmp_path: Path) -> None:
    assert "standard input is not UTF-8" in generate(stdin=b"\xff").stderr
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b"\xff")
    assert "is not UTF-8 text" in generate("--prompts", str(file)).stderr
    file.write_bytes(b"\n")
    assert "has no prompts" in generate("--prompts", str(file)).stderr
    file.write_text(json.dumps({"prompt": "a\ud800"}))
    assert f"{file}:1: the text is not valid Unicode" in generate("--prompts", str(file)).stderr


def test_a_line_that_cannot_run_names_its_own_keys(generate: Run, tmp_path: Path) -> None:
    """And options where the value is the run's."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "a", "max_new_tokens": 300}) + "\n")
    assert (
        f"{file}:1: prompt (2 tokens) + max_new_tokens (300) needs"
        in generate("--prompts", str(file)).stderr
    )
    file.write_text(json.dumps({"prompt": "a"}) + "\n")
    done = generate("--prompts", str(file), "--max-new-tokens", "300")
    assert f"{file}:1: prompt (2 tokens) + --max-new-tokens (300) needs" in done.stderr


def test_one_bad_prompt_among_many_is_reported_and_the_rest_are_done(generate: Run) -> None:
    """The others keep their places, and so their seeds."""
    sampled = ("--temperature", "1", "--json", "-")
    good = generate("a", "b", "c", *sampled).rows
    for bad, message in (("", "the prompt is empty"), ("a" * 60, "pass --cache-length 77")):
        done = generate("a", bad, "c", *sampled)
        assert done.code == 1
        assert f"error: argument 2: {done.rows[1]['error']}" in done.stderr
        assert message in done.rows[1]["error"]
        assert list(done.rows[1]) == [*KEYS[:5], "finish_reason", "error"]
        assert done.rows[1]["finish_reason"] == "error"
        assert [done.rows[0], done.rows[2]] == [good[0], good[2]]
        assert done.summary["errors"] == 1
        assert generate("a", bad, "c").stdout.count("──") == 4  # two headers


def test_all_prompts_bad_is_no_run(generate: Run, tmp_path: Path) -> None:
    done = generate("", "a" * 60, "--json", str(tmp_path / "out"))
    assert done.code == 2
    assert "argument 1: the prompt is empty" in done.stderr
    assert "argument 2: cache holds 64 positions" in done.stderr
    assert list(tmp_path.iterdir()) == []


def out_of_memory(self: Engine, requests: Any) -> Iterator[Update | Completion]:
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 GB\nmore")
    yield


def test_running_out_of_memory_says_what_would_help(
    generate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "run", out_of_memory)
    done = generate("a")
    assert done.code == 2
    assert "lower --batch-size or --cache-length" in done.stderr
    assert done.stderr.endswith("(RESOURCE_EXHAUSTED: 9 GB)\n")


# --- start-up ----------------------------------------------------------------------------------------


@pytest.fixture
def jax_settings() -> Iterator[None]:
    names = (
        "jax_compilation_cache_dir",
        "jax_enable_compilation_cache",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("jax_settings")
def test_compiled_programs_are_kept_where_the_user_keeps_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    console = Console(stderr=True)
    startup.set_compilation_cache(None, console)
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "jaxspec" / "compiled")
    startup.set_compilation_cache(str(tmp_path / "mine"), console)
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")
    startup.set_compilation_cache("off", console)
    assert not jax.config.jax_enable_compilation_cache


@pytest.mark.parametrize(
    ("platforms", "plugins", "chosen", "expected"),
    [
        (None, (), None, "1"),
        (None, (), "6", "6"),
        (None, ("xla_cuda13",), None, None),  # may start on a GPU, whose compiler needs the threads
        ("cpu", ("xla_cuda13",), None, "1"),
    ],
)
def test_one_thread_where_jax_starts_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
    platforms: str | None,
    plugins: Sequence[str],
    chosen: str | None,
    expected: str | None,
) -> None:
    environment = {} if chosen is None else {"NPROC": chosen}
    monkeypatch.setattr(startup.os, "environ", environment)
    monkeypatch.setattr(startup.importlib.metadata, "entry_points", lambda group: plugins)
    monkeypatch.setattr(startup.jax, "config", SimpleNamespace(values={"jax_platforms": platforms}))
    startup.use_one_thread()
    assert environment.get("NPROC") == expected


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
@pytest.mark.parametrize(
    ("options", "devices"),
    [((), 1), pytest.param(("--mesh", "model=2"), 2, marks=pytest.mark.slow)],
)
def test_the_bundled_pair_runs_on_one_thread(options: Sequence[str], devices: int) -> None:
    """Counts XLA's for its programs; under a mesh there is at least one a device."""
    script = (
        "import sys, pathlib, typer.testing, jaxspec.commands.cli as cli\n"
        "done = typer.testing.CliRunner().invoke(cli.app, sys.argv[1:])\n"
        "names = [p.read_text() for p in pathlib.Path('/proc/self/task').glob('*/comm')]\n"
        "print(done.exit_code, sum('XLAEigen' in name for name in names))"
    )
    command = [sys.executable, "-c", script, "generate", "def", "--max-new-tokens", "2", *options]
    environment = {k: v for k, v in os.environ.items() if k != "NPROC"}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    code, threads = map(int, done.stdout.split())
    assert code == 0
    assert threads == 1 if devices == 1 else threads > 1


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("generate", "--max-new-tokens"),
        ("check", "--floor"),
        ("bench", "--random-weights"),
        ("convert", "--to-hf"),
    ],
)
def test_help_and_version_start_without_jax(command: str, flag: str) -> None:
    code = (
        "import sys, jaxspec.commands.cli as cli\n"
        f"try: cli.app([{command!r}, '--help'])\n"
        "finally: print([m for m in ('jax', 'transformers', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert flag in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_convert_is_passed_on(invoke: Run) -> None:
    assert "--to-hf" in invoke("convert", "--help").stdout
    done = invoke("convert", "nowhere", "there")
    assert done.code == 2
    assert "nowhere does not exist" in done.stderr


def test_the_bundled_pair_writes_text_on_a_terminal(tmp_path: Path) -> None:
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxspec", "generate", "def read(path):", "--max-new-tokens", "24"],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path), "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=end,
        stderr=subprocess.PIPE,
        text=True,
    )
    _, table = process.communicate()
    os.close(end)
    shown = os.read(terminal, 10_000).decode()
    os.close(terminal)
    assert process.returncode == 0, table
    assert shown.startswith(
        "\x1b[2mdef read(path):\x1b[0m"
    )  # the prompt, dim; then what follows it
    assert len(shown.split("\x1b[0m")[1].strip()) > 10
    assert "24 new" in table
    assert "draft token 7" in table
    assert "bundled target + bundled dflash · float32 on cpu" in table


@pytest.mark.slow  # two more processes that compile
def test_two_processes_write_what_one_does(
    generate: Run, checkpoints: Path, tmp_path: Path
) -> None:
    """The second process writes nothing."""
    args = ["a", "b", "--cache-length", "64", "--max-new-tokens", "12", "--json"]
    expected = generate(*args, "-", "--batch-size", "2").rows
    of_each = [[*args, str(tmp_path / f"{rank}.jsonl")] for rank in range(2)]
    with two_processes(checkpoints, GENERATE, *of_each) as pair:
        (_, errors), (_, second_errors) = [process.communicate(timeout=600) for process in pair]
    assert [process.returncode for process in pair] == [0, 0], errors + second_errors
    (written,) = tmp_path.iterdir()
    *rows, summary = map(json.loads, written.read_text().splitlines())
    assert rows == expected
    assert summary["summary"]["mesh"] == {"data": 2, "model": 1}
    assert "acceptance length" in errors
    assert "acceptance length" not in second_errors


@pytest.mark.slow  # two more processes
def test_processes_that_disagree_end_with_an_error(checkpoints: Path) -> None:
    args = ["a", "b", "--max-new-tokens"]
    with two_processes(checkpoints, GENERATE, [*args, "12"], [*args, "13"]) as pair:
        outputs = [process.communicate(timeout=120) for process in pair]
    assert [process.returncode for process in pair] == [2, 2], outputs
    for _, errors in outputs:
        assert "options or prompts of process 1 are not those of process 0" in errors


@pytest.mark.slow  # waits for a heartbeat that does not come
@pytest.mark.parametrize("gone", [0, 1])
def test_a_process_that_dies_ends_the_other(checkpoints: Path, tmp_path: Path, gone: int) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": "a" * (1 + i % 9)}) + "\n" for i in range(4000)]
    prompts.write_text("".join(lines))
    sizes = ["--batch-size", "2", "--cache-length", "64", "--max-new-tokens", "40"]
    args = ["--prompts", str(prompts), *sizes, "--json"]
    of_each = [[*args, str(tmp_path / f"{rank}.jsonl")] for rank in range(2)]
    with two_processes(checkpoints, GENERATE, *of_each) as pair:
        rows, begun = tmp_path / "0.jsonl", time.monotonic()
        while not rows.exists() or not rows.read_text():
            assert [process.poll() for process in pair] == [None, None]
            assert time.monotonic() - begun < 120
            time.sleep(0.2)
        pair[gone].kill()
        died = time.monotonic()
        _, errors = pair[1 - gone].communicate(timeout=120)
    assert pair[1 - gone].returncode not in (0, None), errors
    assert time.monotonic() - died < startup.HEARTBEAT_S + 60
    assert errors.strip()
