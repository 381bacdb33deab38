"""Texts from files, and files that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.tokenizer import Tokenizer
from jaxspec.training import texts as t
from jaxspec.training.texts import Batches, DataError, Text, Texts, take_answered
from tests import tiny_pair


def write(path: Path, *lines: Any) -> list[Path]:
    path.write_text("".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in lines))
    return [path]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    tiny_pair.write_tokenizer(directory)
    return Tokenizer.load(directory)


def read(paths: list[Path], tokenizer: Tokenizer) -> list[Text]:
    made = t.read_texts(
        paths, vocab_size=len(tiny_pair.VOCAB), tokenizer=lambda: tokenizer, end=tiny_pair.EOS
    )
    return list(made)


def test_every_form_of_a_line(tmp_path: Path, tokenizer: Tokenizer) -> None:
    answer = tokenizer.encode_rendered("ab a")
    messages = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "ab a"}]
    made = read(
        write(
            tmp_path / "a.jsonl",
            {"prompt_ids": [2, 9], "token_ids": [*answer, 1], "text": "ab a"},
            {"prompt": "b", "completion": "ab a"},
            "\n",
            {"index": 3, "prompt_ids": [2], "error": "too long"},
            {"messages": messages},
        ),
        tokenizer,
    )
    assert [text.answer for text in made] == [(*answer, tiny_pair.EOS)] * 3
    assert made[0].prompt == (2, 9)
    assert made[1].prompt == tokenizer.encode("b")
    assert made[2].prompt == tokenizer.apply_chat(messages[:1])
    prompts = t.read_prompts(
        write(tmp_path / "b.jsonl", {"messages": messages}), tokenizer=lambda: tokenizer
    )
    assert list(prompts) == [made[2].prompt]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is not JSON"),
        ({"prompt_ids": [2], "token_ids": [9, 5000]}, "id 5000, and .* another tokenizer"),
        (
            {"prompt_ids": [2], "token_ids": [70, 71, 72, 73, 74, 75], "text": "another text"},
            "made with another tokenizer",
        ),
        ({"prompt_ids": [], "token_ids": [9]}, "empty prompt"),
        ({"prompt_ids": "ab", "token_ids": [9]}, "prompt_ids is no list of ids"),
        ({"question": 1}, "has question; expected prompt_ids and token_ids"),
        ({"messages": [{"role": "user", "content": "b"}]}, "not the assistant's"),
        ("\n", "no texts"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, tokenizer: Tokenizer, line: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(write(tmp_path / "bad.jsonl", line), tokenizer)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl cannot be read: No such file"):
        t.write_tokens(tmp_path / "tokens", iter(read([tmp_path / "nowhere.jsonl"], tokenizer)))
    assert not (tmp_path / "tokens").exists()


def test_texts_shorter_than_a_block_are_left_out_and_refused_if_all_are() -> None:
    short, long = Text((2, 3), (4, 5, 6)), Text((2, 3), (4, 5, 6, 7))
    both = Texts.of([short, long])
    kept = t.usable(both, 3, 100)
    assert [kept[i] for i in range(len(kept))] == [long]
    with pytest.raises(DataError, match=r"the longest has 4 tokens, .* within the first 5 tokens"):
        t.usable(both, 3, 5)


def test_texts_of_a_file_are_those_in_memory(tmp_path: Path) -> None:
    """One after the other is written: a reader that looks at the file finds the first ones there."""
    rng = np.random.default_rng(0)
    pairs = [rng.integers(0, 250_000, n).tolist() for n in rng.integers(4, 90, 40)]
    texts = [Text(tuple(ids[:3]), tuple(ids[3:])) for ids in pairs]
    inside = Texts.of(texts)
    there = t.write_tokens(tmp_path / "tokens", iter(texts))
    assert isinstance(there.tokens, np.memmap)
    assert [there[i] for i in range(40)] == texts == [inside[i] for i in range(40)]
    assert there.digest() == inside.digest() != inside.take(np.arange(39)).digest()
    for made in zip(
        there.rows(np.asarray([7, 3]), 32), inside.rows(np.asarray([7, 3]), 32), strict=True
    ):
        np.testing.assert_array_equal(*made)
    tokens, lengths, answers = there.rows(np.asarray([5]), 32)
    whole = [*texts[5].prompt, *texts[5].answer][:32]
    assert tokens[0].tolist() == whole + [0] * (32 - len(whole))
    assert answers[0].tolist() == [3 <= i < len(whole) for i in range(32)]
    assert lengths.tolist() == [len(whole)]


def test_batches_follow_from_the_step_and_hold_each_text_once_an_epoch() -> None:
    texts = Texts.of([Text((i,), (i, i)) for i in range(10)])
    batches = Batches(texts, rows=2, parts=2, width=8, seed=3)
    seen = [np.asarray(batches(step).tokens[..., 0]).ravel().tolist() for step in range(5)]
    assert batches(0).tokens.shape == (2, 2, 8)
    flat = [i for step in seen for i in step]
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(10))
    assert flat[:10] != flat[10:]
    again = Batches(texts, rows=2, parts=2, width=8, seed=3)
    assert np.asarray(again(3).tokens[..., 0]).ravel().tolist() == seen[3]
    together = again(1, 3, 4).tokens[..., 0].reshape(4, -1).tolist()
    assert together == [seen[1], seen[2], seen[2], seen[2]]
    other = Batches(texts, rows=2, parts=2, width=8, seed=2**32 - 1)
    assert np.asarray(other(0).tokens[..., 0]).ravel().tolist() != seen[0]
    learnt, held_out = t.split(texts, 16, 0)
    assert len(held_out) == 2
    assert sorted(x[i].prompt for x in (learnt, held_out) for i in range(len(x))) == [
        (i,) for i in range(10)
    ]


def test_a_line_that_is_no_answer_is_named(tmp_path: Path) -> None:
    path = tmp_path / "texts.partial"
    path.write_text('{"prompt_ids": [1]}\n{"prompt')
    assert take_answered(path, iter([(1,), (2,)])) == 1
    assert path.read_text() == '{"prompt_ids": [1]}\n'
    path.write_text('{"prompt_ids": [1]}\n\0\0\n')
    with pytest.raises(DataError, match="line 2 is no answer: remove the file"):
        take_answered(path, iter([(1,), (2,)]))
