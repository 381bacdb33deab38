"""The short API: every form of prompt, one result for one prompt, and errors that name what is wrong."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

import jaxspec
from jaxspec import Drafting, Engine, FieldError, Generation, OpenEngine, Pair, Sampler, Sampling
from jaxspec.commands.generate.options import TextOptions
from jaxspec.commands.generate.prompts import PromptInput, encode
from jaxspec.registry import presets
from jaxspec.tokenizer import TokenizerError
from jaxspec.weights.define import model_def_of

TEXT = "def f(x):\n"
NEW = 12
CHAT = "{{ bos_token }}{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def pair() -> Pair:
    return jaxspec.load(dtype="float32")


@pytest.fixture(scope="module")
def done(pair: Pair) -> Generation:
    return pair.generate(TEXT, max_new_tokens=NEW)


def test_all_forms_of_a_prompt_are_one_prompt(pair: Pair, done: Generation) -> None:
    ids = pair.encode(TEXT)
    assert (done.prompt, done.prompt_ids, len(done.token_ids)) == (TEXT, ids, NEW)
    assert done.text == str(done) == pair.decode(done.token_ids)
    assert done.acceptance_length > 1
    for form in (list(ids), ids, np.asarray(ids)):
        assert pair.generate(form, max_new_tokens=NEW).token_ids == done.token_ids
    (listed,) = pair.generate([TEXT], max_new_tokens=NEW)
    assert listed == done
    for many in ([TEXT, ids], np.asarray([ids, ids])):
        both = pair.generate(many, max_new_tokens=NEW)
        assert [d.token_ids for d in both] == [done.token_ids] * 2
    assert jaxspec.generate(pair, TEXT, max_new_tokens=NEW) == done


def test_messages_and_chat_go_through_the_template(pair: Pair) -> None:
    chat = Pair(pair.target, pair.drafter, pair.programs)
    chat.tokenizer.chat_template = CHAT
    message = {"role": "user", "content": "sort a list"}
    one = chat.generate([message], max_new_tokens=4)
    assert one.prompt == "<bos># user: sort a list\n"
    assert one.prompt_ids[0] == pair.tokenizer.bos_token_id != one.prompt_ids[1]
    assert chat.generate("sort a list", chat=True, max_new_tokens=4) == one
    assert chat.generate([[message], [message]], max_new_tokens=4) == [one, one]
    chat.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        chat.generate("sort a list", chat=True)


def test_a_stream_is_the_text_in_pieces(pair: Pair, done: Generation) -> None:
    stream, pieces = pair.stream(TEXT, max_new_tokens=NEW), []
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            result = end.value
            break
    assert len(pieces) > 1
    assert "".join(pieces) == done.text
    assert result == done


def test_a_text_by_its_steps(pair: Pair, done: Generation) -> None:
    assert len(done.steps[0]) == 1
    assert sum(done.steps, ()) == done.token_ids
    pieces = pair.text_by_step(done)
    assert len(pieces) == len(done.steps)
    assert "".join(pieces) == done.text


def test_options_are_records(pair: Pair, done: Generation) -> None:
    assert pair.plain().generate(TEXT, max_new_tokens=NEW).token_ids == done.token_ids
    sampling = Sampling(temperature=1.0, top_logprobs=2, logprobs=True)
    three = pair.generate(
        TEXT, max_new_tokens=NEW, sampling=sampling, drafting=Drafting(3), num_samples=3
    )
    assert len({d.token_ids for d in three}) == 3
    assert all(len(d.top_logprobs) == len(d.token_ids) == len(d.logprobs) for d in three)
    stopped = pair.generate(TEXT, max_new_tokens=NEW, stop_texts=[done.text[3:5]])
    assert stopped.text == done.text[: done.text.index(done.text[3:5])]
    assert stopped.finish_reason == "stop"


def test_sampling_by_keywords_and_by_a_mapping(pair: Pair) -> None:
    """Both raised AttributeError or TypeError, as with no other engine."""
    ways: list[dict[str, Any]] = [
        dict(sampling=Sampling(temperature=1.0, top_k=5)),
        dict(sampling=dict(temperature=1.0, top_k=5)),
        dict(temperature=1.0, top_k=5),
        dict(sampling=Sampling(temperature=1.0), top_k=5),
    ]
    drawn = {pair.generate(TEXT, max_new_tokens=NEW, seed=3, **way).token_ids for way in ways}
    assert len(drawn) == 1
    assert drawn != {pair.generate(TEXT, max_new_tokens=NEW).token_ids}
    assert "".join(pair.stream(TEXT, max_new_tokens=NEW, seed=3, temperature=1.0, top_k=5))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(max_tokens=4), TypeError, "no argument 'max_tokens'; did you mean max_new_tokens"),
        (dict(temprature=1.0), TypeError, "no argument 'temprature'; did you mean temperature"),
        (dict(n=4), TypeError, "no argument 'n'; did you mean num_samples"),
        (dict(best_of=4), TypeError, "no argument 'best_of'; known are prompts, max_new_tokens, "),
        (dict(top_k=2**31), FieldError, "top_k is 2147483648; it must be 0 or more"),
        (
            dict(sampling={"topk": 1}),
            FieldError,
            "sampling has no field 'topk'; did you mean top_k",
        ),
        (dict(sampling=0.7), FieldError, "sampling is 0.7; it must be a Sampling"),
        (dict(drafting={"drafts": 1}), FieldError, "drafting has no field 'drafts'"),
    ],
)
def test_options_that_are_not_known(
    pair: Pair, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    call = getattr(Pair.generate, "__wrapped__", Pair.generate)  # without checks of annotations
    with pytest.raises(error, match=message):
        call(pair, TEXT, **options)


def test_a_bar_counts_completions_where_it_is_seen(
    pair: Pair, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [pair.encode(TEXT)] * 2

    def shown(**options: Any) -> str:
        pair.generate(prompts, max_new_tokens=2, **options)
        return capsys.readouterr().err

    assert shown() == ""  # standard error is no terminal
    assert "0/2" in shown(progress=True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert "0/2" in shown()
    assert shown(progress=False) == ""
    pair.generate(prompts[0], max_new_tokens=2)
    assert capsys.readouterr().err == ""  # one completion


def test_a_picture_of_acceptance(pair: Pair, done: Generation) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    def heights(result: Any) -> list[float]:
        axes = Figure().subplots()
        assert jaxspec.plot_acceptance(result, axes) is axes
        return [bar.get_height() for bar in axes.patches]

    sampler = Sampler(pair, max_new_tokens=NEW)
    assert pair.drafter is not None
    result = sampler(pair.target.params, pair.drafter.params, [done.prompt_ids])
    shares = result.accepted_per_depth().tolist()
    assert heights(result) == pytest.approx(shares)
    for of_pair in (done, [done, done]):
        drawn = heights(of_pair)
        assert drawn == pytest.approx(shares[: len(drawn)])
    with pytest.raises(ValueError, match="nothing to draw"):
        jaxspec.plot_acceptance(pair.plain().generate(TEXT, max_new_tokens=2))


def test_a_second_call_compiles_nothing(pair: Pair, done: Generation) -> None:
    programs = len(pair.programs.compiled)
    pair.generate(TEXT, max_new_tokens=NEW, seed=3)
    assert len(pair.programs.compiled) == programs


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "the prompt is empty; give at least one character"),
        (["a", ""], "prompt 1 is empty"),
        ([], "there is no prompt"),
        ([2.0, 5.0], r"the prompt has the id 2\.0; expected whole numbers"),
        (np.asarray([[2.0, 5.0]]), r"prompt 0 has the id 2\.0; expected whole numbers"),
        ([2, 10**6], r"prompt ids \[1000000\] are outside the vocabulary"),
        ([[2], [-1]], r"prompt 1: prompt ids \[-1\] are outside the vocabulary"),
        ([[2], 5], "prompt 1 is 5; expected text, a list of messages, or a list of token ids"),
        (None, "the prompt is None; expected text"),
        ([2, True], r"the prompt has the id True; expected whole numbers"),
        ([2, 2**32 + 5], "the prompt has the id 4294967301; expected whole numbers of 32 bits"),
    ],
)
def test_prompts_that_cannot_be_meant(pair: Pair, prompts: Any, message: str) -> None:
    """By the library's own checks: the annotations, which only tests enforce, would refuse some before."""
    call = getattr(Pair.generate, "__wrapped__", Pair.generate)
    with pytest.raises(ValueError, match=message):
        call(pair, prompts)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (dict(max_new_tokens=0), "max_new_tokens"),
        (dict(num_samples=0), "num_samples"),
        (dict(seed=2**32), "seed"),
        (dict(seed=-1), "seed"),
        (dict(stop_texts=[""]), "stop_texts"),
        (dict(drafting=Drafting(99)), "num_draft_tokens"),
    ],
)
def test_errors_carry_their_field(pair: Pair, options: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError) as error:
        pair.generate(TEXT, **options)
    assert error.value.field == field


def test_a_drafter_s_options_need_a_drafter(pair: Pair) -> None:
    with pytest.raises(FieldError, match="num_draft_tokens was given, but there is no drafter"):
        pair.plain().generate(TEXT, drafting=Drafting(3))


def test_an_empty_text_is_refused_wherever_it_is_given(pair: Pair) -> None:
    """Also as a user's turn, which the command used to send through the chat template."""
    chat = Pair(pair.target, pair.drafter, pair.programs)
    chat.tokenizer.chat_template = CHAT
    calls = (
        lambda: pair.generate(""),
        lambda: pair.generate("", chat=True),
        lambda: pair.stream(""),
        lambda: pair.encode(""),
        lambda: encode(PromptInput("argument 1", text=""), pair.tokenizer),
        lambda: encode(
            PromptInput("argument 1", text=""),
            chat.tokenizer,
            options=TextOptions(chat=True),
        ),
    )
    for call in calls:
        with pytest.raises(
            TokenizerError, match="the prompt is empty; give at least one character"
        ):
            call()
    # A conversation is the template's business, and the ids of BOS alone are a prompt.
    assert chat.encode([{"role": "user", "content": ""}])
    assert pair.generate([pair.tokenizer.bos_token_id], max_new_tokens=2).token_ids


def test_what_is_shown_is_short(pair: Pair) -> None:
    big = model_def_of(presets()["31b"], "bfloat16")
    engine, sampler = Engine(*pair, cache_length=64), Sampler(pair)
    opened = OpenEngine(engine)
    opened.close()
    things = (pair, pair.target, pair.drafter, pair.target.model_def, big, engine, sampler, opened)
    for thing in things:
        assert " object at 0x" not in repr(thing)
        shown = repr(thing)
        assert "\n" not in shown
        assert len(shown) < 400
    assert "60 layers" in repr(big) or "50 sliding + 10 full" in repr(big)
    assert "float32" in repr(pair.target)
    target, drafter = pair
    assert (target, drafter) == (pair.target, pair.drafter)
    assert set(dir(jaxspec)) == {*jaxspec.__all__, "__version__"}
    assert all(hasattr(jaxspec, name) for name in dir(jaxspec))
