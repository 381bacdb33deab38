"""`jaxspec train-drafter` on the tiny pair: a run, what it writes, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxspec
from jaxspec.commands.check.text import cut
from jaxspec.commands.train_drafter import run as command_run
from jaxspec.rollout.sampler import Sampler
from jaxspec.tokenizer import Tokenizer
from jaxspec.weights.loading import load_drafter
from jaxspec.weights.measured_acceptance import read_acceptance, write_acceptance
from tests.commands.conftest import Run

SHORT = ("--steps", "4", "--rows", "2", "--anchors", "8", "--held-out", "2")
SHORT += ("--evaluated-tokens", "6", "--evaluate-every", "2")


@pytest.fixture
def data(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    rows = ({"prompt_ids": [2, *rng.integers(6, 200, 7).tolist()]} for _ in range(12))
    rows = ({**row, "token_ids": rng.integers(6, 200, 12).tolist()} for row in rows)
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_run_writes_a_drafter_that_loads(invoke: Run, data: str, tmp_path: Path) -> None:
    """What was measured of the drafter that it started from does not stay."""
    out, start = tmp_path / "run", tmp_path / "start"
    shutil.copytree("drafter", start)
    write_acceptance(start, {"of": "other weights"})
    command = ["train-drafter", "target", "--from", str(start), "--data", data, "--out", str(out)]
    more = ("--features", str(tmp_path / "features"), "--loss", "kl=0.5,ce=0.5,decay=none")
    done = invoke(*command, *SHORT, *more, "--regenerate", "--answer-tokens", "9")
    assert done.code == 0, done.stderr
    (about,) = (out / "checkpoints" / "00000004").glob("run.json")
    assert "cross_entropy=0.5, kl=0.5, total_variation=0.0" in about.read_text()
    assert "decay=None" in about.read_text()
    assert "features of 10 texts in" in " ".join(done.stderr.split())
    assert (tmp_path / "features" / "features.json").exists()
    assert "tokens a verify step on 2 held-out prompts, greedy" in " ".join(done.stdout.split())
    written = [json.loads(x) for x in (out / "texts.jsonl").read_text().splitlines()]
    pair = jaxspec.load("target", str(out / "drafter"), dtype="float32")
    prompts = [x["prompt_ids"] for x in written]
    by_the_target = pair.plain().generate(prompts, max_new_tokens=9, progress=False)
    assert [x["token_ids"] for x in written] == [list(x.token_ids) for x in by_the_target]
    steps = [json.loads(x)["step"] for x in (out / "curves.jsonl").read_text().splitlines()]
    assert steps == [0, 2, 4]
    if importlib.util.find_spec("matplotlib"):
        assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert read_acceptance(start) is not None
    assert [read_acceptance(out / name) for name in ("drafter", "drafter-hf")] == [None, None]
    again = invoke(*command, *SHORT, "--regenerate", "--answer-tokens", "9")
    assert again.code == 2
    assert "the run is over; give another --out" in " ".join(again.stderr.split())


class Killed(BaseException):
    """The end of a run that was killed."""


def test_answers_go_on_where_a_killed_run_was(
    invoke: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawn answers are those of a run that was not killed. The template turns thinking on in each prompt."""
    turns = [[{"role": "user", "content": chr(97 + i)}] for i in range(12)]
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps({"messages": x}) + "\n" for x in turns))
    command = ["train-drafter", "target", "--from", "drafter", "--data", str(data), *SHORT]
    command += ["--regenerate", "--answer-tokens", "9", "--temperature", "1", "--batch-size", "1"]
    call, sizes = Sampler.__call__, []

    def counted(self: Sampler, *args: Any, **kwargs: Any) -> Any:
        if self.max_new_tokens == 9:
            sizes.append(len(args[2]))
        if dies and len(sizes) == 2:
            raise Killed
        return call(self, *args, **kwargs)

    def ends(*args: Any) -> Any:
        raise Killed  # answers are all that is looked at

    dies = False
    monkeypatch.setattr(Sampler, "__call__", counted)
    monkeypatch.setattr(command_run, "train", ends)
    whole, out = tmp_path / "whole", tmp_path / "run"
    with pytest.raises(Killed):
        invoke(*command, "--thinking", "--out", str(whole))
    assert sizes == [8, 4]
    dies, sizes[:] = True, []
    with pytest.raises(Killed):
        invoke(*command, "--thinking", "--out", str(out))
    assert not (out / "texts.jsonl").exists()
    dies, sizes[:] = False, []
    with (out / "texts.partial").open("a") as file:
        file.write('{"prompt_ids": [2, ')
    refused = invoke(*command, "--out", str(out))
    assert refused.code == 2
    assert "holds answers with another --thinking: give" in " ".join(refused.stderr.split())
    with pytest.raises(Killed):
        invoke(*command, "--thinking", "--out", str(out))
    assert sizes == [4]
    assert (out / "texts.jsonl").read_text() == (whole / "texts.jsonl").read_text()
    rows = [json.loads(x) for x in (out / "texts.jsonl").read_text().splitlines()]
    tokenizer = Tokenizer.load(Path("target"))
    thinking = [list(tokenizer.apply_chat(x, enable_thinking=True)) for x in turns]
    assert [row["prompt_ids"] for row in rows] == thinking
    assert thinking[0] != list(tokenizer.apply_chat(turns[0]))


def test_answers_to_other_prompts_are_refused(invoke: Run, data: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "texts.partial").write_text('{"prompt_ids": [2, 7], "token_ids": [8]}\n')
    command = ["train-drafter", "target", "--from", "drafter", "--data", data, "--out", str(out)]
    done = invoke(*command, "--regenerate")
    assert done.code == 2
    assert "line 1 answers another prompt than --data has there" in " ".join(done.stderr.split())


@pytest.mark.slow  # half a minute; `training/test_new` compares directories, `test_check` checks the bundled pair
@pytest.mark.parametrize(
    "options",
    [
        "--kind dflash --container speculators",
        "--kind dflash",
        "--kind dflash2",
        "--kind dflash2 --container speculators",
        "--kind dspark",
        "--kind dspark --container speculators",
        "--kind mtp",
    ],
)
def test_check_passes_on_what_comes_out(invoke: Run, tmp_path: Path, options: str) -> None:
    """Both directories hold the same. Their records hold what was measured on the held-out prompts.

    The random target is learnt by heart: each prompt comes twice, and the check has the same ones.
    """
    text, data, out = (tmp_path / name for name in ("prose.txt", "texts.jsonl", "run"))
    text.write_text(" ".join(f"{i} is {i * i}" for i in range(60)))
    tokenizer = Tokenizer.load(Path("target"))
    prompts = cut(tokenizer.encode(text.read_text()), tokenizer.bos_token_id, 8)
    lines = [json.dumps({"prompt_ids": ids}) + "\n" for ids in prompts]
    data.write_text("".join(lines * 2))
    # Rows are too short for a longer block, which would gain where the target repeats itself.
    sizes = () if "mtp" in options else ("--layers", "2", "--block-size", "7")
    command = ["train-drafter", "target", *options.split(), "--data", str(data), "--out", str(out)]
    command += [
        *sizes,
        "--steps",
        "200",
        "--rows",
        "4",
        "--anchors",
        "12",
        "--learning-rate",
        "5e-3",
    ]
    command += ["--held-out", "4", "--evaluate-every", "200", "--evaluated-tokens", "12"]
    done = invoke(*command, "--regenerate", "--answer-tokens", "16")
    assert done.code == 0, done.stderr
    loaded = [load_drafter(str(out / n), dtype="float32") for n in ("drafter", "drafter-hf")]
    assert loaded[0].config == loaded[1].config
    for name, x in loaded[0].params.items():
        np.testing.assert_array_equal(x, loaded[1].params[name], err_msg=name)
    records = [read_acceptance(drafter.directory) for drafter in loaded]
    assert records[0] == records[1]
    assert records[0]["text"] == "prompts held out of texts.jsonl"
    assert (records[0]["rows"], records[0]["new_tokens"]) == (4, 12)
    of_check = ("--text", str(text), "--rows", "8", "--new-tokens", "12")
    checked = invoke("check", "target", str(out / "drafter-hf"), *of_check)
    assert checked.code == 0, checked.stdout
    assert "on another text: prompts held out of texts.jsonl" in " ".join(checked.stdout.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--out x", "--data is needed"),
        ("--data {data}", "--out is needed"),
        ("--data {data} --out x", "--kind is needed for a new drafter, or --from"),
        ("--data {data} --out x --from drafter --layers 2", "--layers: of new drafters"),
        (
            "--data {data} --out x --kind dflash --hidden-size 48",
            "has the target's, 32: leave it out",
        ),
        ("--data {data} --out x --kind dflash --minutes 0", "minutes"),
        ("--data {data} --out x --kind mtp --container speculators", "has one layout only"),
        ("--data {data} --out x --from ngram", "NGramDrafter is not trained; DFlash, DFlash2"),
        ("--data {data} --out x --from narrow", "the drafter does not fit the target"),
        ("--data {data} --out x --kind mtp --from drafter", "cannot start from one of kind dflash"),
        ("--data {data} --out x --from drafter --max-length 8", "no answer is as long as a block"),
        ("--data nowhere.jsonl --out x --from drafter", "nowhere.jsonl"),
        ("--data {data} --out x --kind dflash --thinking", "add --regenerate"),
        ("--data {data} --out x --kind dflash --steps 0", "steps"),
        (
            "--data {data} --out x --kind dflash --loss nll=1",
            "the term 'nll'; the terms are ce, kl",
        ),
        (
            "--data {data} --out x --kind dflash --loss kl=-1",
            "kl=-1; expected a number of 0 or more",
        ),
        (
            "--data {data} --out x --kind dflash --loss kl",
            "expected a number of 0 or more, as in kl=",
        ),
        ("--data {data} --out x --kind dflash --loss survival=2", "a number from 0 to 1"),
        ("--data {data} --out x --kind dflash --loss kl=1,kl=1", "has kl twice"),
        (
            "--data {data} --out x --kind mtp --loss base_kl=1",
            "which mtp has not: it is of dflash2",
        ),
        (
            "--data {data} --out x --from drafter --loss clusters=1",
            "which dflash has not: it is of",
        ),
    ],
)
def test_mistakes_are_named(
    invoke: Run, data: str, tmp_path: Path, options: str, message: str
) -> None:
    words = options.format(data=data).replace(" x", f" {tmp_path / 'x'}").split()
    done = invoke("train-drafter", "target", *words)
    assert done.code == 2, done.stdout
    assert message in " ".join(done.stderr.split())
    assert not (tmp_path / "x" / "drafter").exists()
