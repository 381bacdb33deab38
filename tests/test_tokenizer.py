"""Text to ids and back, whole and as it streams."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from jaxspec.tokenizer import (
    TextStream,
    Tokenizer,
    TokenizerError,
    completed_text,
    stop_at_text,
)
from tests import tiny_pair
from tests.weights.test_bad_input import LFS


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tiny_pair.write_tokenizer(path)
    return path


def gemma() -> Tokenizer:
    return Tokenizer(tiny_pair.backend(), special_tokens={"bos_token": "<bos>"})


def byte_level() -> Tokenizer:
    """A tokenizer of GPT's kind: every byte is a letter, and characters are split between tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return Tokenizer(made)


def leading_space() -> Tokenizer:
    """A tokenizer of Llama's kind: the first token of a text loses its space."""
    made = tiny_pair.backend()
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(made)


KINDS = {kind.__name__: kind() for kind in (gemma, byte_level, leading_space)}


@st.composite
def streams(draw: st.DrawFn) -> tuple[Tokenizer, list[int], list[int], list[str]]:
    """A tokenizer, tokens, where they are cut into updates, and stop texts."""
    tokenizer = KINDS[draw(st.sampled_from(sorted(KINDS)))]
    any_token = st.integers(0, tokenizer.backend.get_vocab_size() - 1)
    words = st.sampled_from(["a", " b", "ab", " the", "é", "😀", "\n", "\ufffd", "the a"])
    piece = st.one_of(
        any_token.map(lambda i: [i]),
        words.map(lambda w: tokenizer.backend.encode(w, add_special_tokens=False).ids),
    )
    ids = [i for p in draw(st.lists(piece, max_size=30)) for i in p]
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=10)))
    # Half a character reads as U+FFFD for a moment: as a stop text it would mean something else each time.
    stops = words.filter(lambda word: word != "\ufffd")
    return tokenizer, ids, cuts, draw(st.lists(stops, max_size=2))


@given(streams())
def test_streamed_pieces_join_to_the_whole_text(
    case: tuple[Tokenizer, list[int], list[int], list[str]],
) -> None:
    tokenizer, ids, cuts, stops = case
    stream = TextStream(tokenizer, stops)
    pieces = [stream.push(ids[:cut]) for cut in cuts]
    pieces.append(stream.finish(ids))
    assert "".join(pieces) == completed_text(tokenizer, ids, stops)


@given(streams())
def test_a_stop_text_ends_at_the_first_token_that_completes_it(
    case: tuple[Tokenizer, list[int], list[int], list[str]],
) -> None:
    """Wherever the loop looks: one token at a time and all at once give the same text."""
    tokenizer, ids, _, stops = case
    stop_at = stop_at_text(tokenizer, stops)
    eager = next((n for n in range(1, len(ids) + 1) if stop_at(ids[:n]) is not None), None)
    late = stop_at(ids)
    if late is None:
        # A wrong byte after a stop text of raw bytes unmakes it; nothing else does.
        assert eager is None or not all(tokenizer.ends_bytes(i) for i in ids)
        return
    text = completed_text(tokenizer, ids[:late], stops)
    assert not any(stop in text for stop in stops)
    assert any(stop in tokenizer.decode(ids[:late]) for stop in stops)
    if all(tokenizer.ends_bytes(i) for i in ids):
        assert late == eager


def test_text_comes_as_soon_as_it_is_certain() -> None:
    tokenizer = gemma()
    ids = tokenizer.encode("a😀 the ab")[1:]
    stream = TextStream(tokenizer, ["e ab!"])
    pieces = [stream.push(ids[:n]) for n in range(1, len(ids) + 1)]
    # The emoji waits for its four bytes and the token after them, "e ab" for the stop text's last letter.
    assert [p for p in pieces if p] == ["a", "😀 ", "th"]
    assert stream.finish(ids) == "e ab"


def test_a_byte_that_spoils_its_run_spoils_nothing_already_shown() -> None:
    """Byte fallback reads a whole run of raw bytes as broken when one is: "é" must not be shown early."""
    tokenizer = gemma()
    byte = {b: tokenizer.backend.token_to_id(f"<0x{b:02X}>") for b in (0xC3, 0xA9)}
    ids = [byte[0xC3], byte[0xA9], byte[0xC3]]
    stream = TextStream(tokenizer)
    assert "".join(itertools.chain([stream.push(ids[:2])], [stream.finish(ids)])) == "\ufffd" * 3


def test_a_special_token_does_not_end_a_run_of_bytes() -> None:
    """It has no text, so the bytes on both sides of it are read together."""
    tokenizer = gemma()
    byte = tokenizer.backend.token_to_id("<0x74>")
    ids = [byte, tiny_pair.EOS, tokenizer.backend.token_to_id("<0xFF>")]
    stream = TextStream(tokenizer)
    assert stream.push(ids[:2]) == ""
    assert stream.finish(ids) == "\ufffd" * 2


CLASSES = (
    *("GemmaTokenizer", "GemmaTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast"),
    *("LlamaTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend", None),
)
"""The classes that checkpoints of the supported families name."""


@pytest.mark.parametrize("model_type", ["gemma4_text", "qwen3"])
@pytest.mark.parametrize("tokenizer_class", CLASSES)
def test_bos_is_added_where_transformers_adds_it(
    tokenizer_class: str | None, model_type: str, tmp_path: Path
) -> None:
    """Fine-tunes of Qwen3 name a `bos_token`: it was added to every text, and transformers adds none."""
    from transformers import AutoTokenizer

    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    for bos_in_file, named, add in itertools.product(
        (True, False), (True, False), (None, True, False)
    ):
        tiny_pair.write_tokenizer(tmp_path, bos=bos_in_file)
        values = {"eos_token": "<eos>", "bos_token": "<bos>" if named else None}
        values |= {"add_bos_token": add, "tokenizer_class": tokenizer_class}
        values = {key: value for key, value in values.items() if value is not None}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
        theirs = AutoTokenizer.from_pretrained(tmp_path)("a b")["input_ids"]
        ours = Tokenizer.load(tmp_path)
        assert (theirs[0] == tiny_pair.BOS) == (ours.encode("a b")[0] == tiny_pair.BOS), values
        assert ours.encode("a b") in ((263, 267), (tiny_pair.BOS, 263, 267))
        if named:
            assert ours.bos_token_id == (tiny_pair.BOS if bos_in_file else None)


@pytest.mark.parametrize("tokenizer_class", ["GemmaTokenizer", "TokenizersBackend"])
@pytest.mark.parametrize(
    ("named", "mapped"),
    [
        ({}, None),
        ({"bos_token": None}, None),
        ({}, {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}}),
        ({"bos_token": "<bos>"}, {"bos_token": "<unk>"}),
        ({"bos_token": "<bos>", "image_token": "<pad>"}, None),
    ],
)
def test_templates_have_the_special_tokens_of_transformers(
    tokenizer_class: str, named: dict[str, str], mapped: dict[str, str] | None, tmp_path: Path
) -> None:
    """Those of special_tokens_map.json, and of the class, were not read: chats began without BOS."""
    from transformers import AutoTokenizer

    template = "{{ bos_token }}|{{ eos_token }}|{{ image_token }}"
    tiny_pair.write_tokenizer(tmp_path, template=template)
    (tmp_path / "config.json").write_text('{"model_type": "gemma4_text"}')
    values = {"tokenizer_class": tokenizer_class, **named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    if mapped is not None:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(mapped))
    messages = [{"role": "user", "content": "a"}]
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(messages, tokenize=False)
    assert Tokenizer.load(tmp_path).render_chat(messages) == theirs


def test_a_bos_that_is_asked_for_and_not_added_is_noted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_pair.write_tokenizer(tmp_path, bos=False)
    Tokenizer.load(tmp_path)
    assert not caplog.text
    values = {"bos_token": "<bos>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    Tokenizer.load(tmp_path)
    assert "texts begin without a BOS" in caplog.text


def test_decoding_leaves_special_tokens_out(directory: Path) -> None:
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.decode(tokenizer.encode("the ab é 😀\n")) == "the ab é 😀\n"


def test_chat_is_what_transformers_makes_of_it(directory: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast.from_pretrained(directory)
    messages = [{"role": "user", "content": "the a"}, {"role": "user", "content": "é"}]
    for kwargs in ({}, {"enable_thinking": True}):
        ours = Tokenizer.load(directory).apply_chat(messages, **kwargs)
        theirs = reference.apply_chat_template(messages, add_generation_prompt=True, **kwargs)
        assert list(ours) == theirs["input_ids"]
    assert ours.count(tiny_pair.BOS) == 1


def test_of_two_templates_the_file_is_taken_with_a_note(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in transformers. An older template often stays in tokenizer_config.json."""
    from transformers import AutoTokenizer

    tiny_pair.write_tokenizer(tmp_path, template="file {{ messages[0].content }}")
    for old, notes in (("file {{ messages[0].content }}\n", 0), ("old", 1)):
        caplog.clear()
        config = {"bos_token": "<bos>", "chat_template": old}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        messages = [{"role": "user", "content": "a"}]
        ours = Tokenizer.load(tmp_path).render_chat(messages)
        assert len(caplog.records) == notes
        (tmp_path / "config.json").write_text('{"model_type": "gemma4_text"}')
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        assert ours == theirs.apply_chat_template(messages, tokenize=False) == "file a"


def test_a_template_may_stand_in_the_tokenizer_config(tmp_path: Path) -> None:
    tiny_pair.write_tokenizer(tmp_path, template=None)
    with pytest.raises(TokenizerError, match="no chat template"):
        Tokenizer.load(tmp_path).render_chat([{"role": "user", "content": "a"}])
    config = {
        "bos_token": "<bos>",
        "chat_template": [{"name": "default", "template": "x{{ bos_token }}"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.load(tmp_path).render_chat([{"role": "user", "content": "a"}]) == "x<bos>"


def test_a_template_may_refuse(tmp_path: Path) -> None:
    tiny_pair.write_tokenizer(tmp_path, template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TokenizerError, match="roles must alternate"):
        Tokenizer.load(tmp_path).render_chat([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("tokenizer.json", LFS, r"tokenizer\.json is a Git LFS pointer"),
        ("tokenizer_config.json", LFS, r"tokenizer_config\.json is a Git LFS pointer"),
        ("chat_template.jinja", LFS, r"chat_template\.jinja is a Git LFS pointer"),
        ("tokenizer_config.json", "[" * 200_000, r"tokenizer_config\.json .* nested too deeply"),
        ("tokenizer.json", "[" * 200_000, r"tokenizer\.json is not a tokenizer"),
        ("chat_template.jinja", b"\xff\xfe", r"chat_template\.jinja cannot be read"),
    ],
)
def test_damaged_files_are_refused(
    tmp_path: Path, file: str, text: str | bytes, message: str
) -> None:
    tiny_pair.write_tokenizer(tmp_path)
    (tmp_path / file).write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.load(tmp_path)


def test_templates_without_a_default_are_no_template(tmp_path: Path) -> None:
    tiny_pair.write_tokenizer(tmp_path, template=None)
    config = {"bos_token": "<bos>", "chat_template": ["x", {"name": "rag", "template": "y"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.load(tmp_path).chat_template is None


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="is not a tokenizer"):
        Tokenizer.load(tmp_path)


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(TokenizerError, match="UTF-8"):
        gemma().encode("a\udcff")
