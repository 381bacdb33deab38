"""The tokens of a reply become text, reasoning and tool calls, however they are grouped."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.text.chat import (
    Event,
    Reasoning,
    StopText,
    Text,
    ToolCallArguments,
    ToolCallBroken,
    ToolCallEnd,
    ToolCallStart,
    format_of,
    merged,
    message_of,
    parser_for,
)
from jaxspec.tokenizer import completed_text
from tests.test_package import _importers
from tests.text.chat.models import ARGUMENTS, GEMMA, QWEN, Family, corpus, parse

FAMILIES = pytest.mark.parametrize("family", [GEMMA, QWEN], ids=lambda f: f.format.name)
CASES = [(f, name) for f in (GEMMA, QWEN) for name in corpus(f)]


def read(family: Family, text: str, reason: str = "stop", **options: Any) -> list[Event]:
    return merged(parse(family, family.encode(text), [], reason, **options)[0])


def check_sound(events: list[Event]) -> None:
    """Every call that begins ends once, complete or broken, and a complete one is valid JSON."""
    begun = [e.index for e in events if isinstance(e, ToolCallStart)]
    ended = [e.index for e in events if isinstance(e, ToolCallEnd | ToolCallBroken)]
    assert begun == ended == list(range(len(begun)))
    for call in message_of(events).get("tool_calls", ()):
        assert isinstance(json.loads(call["function"]["arguments"]), dict)


@pytest.mark.parametrize(
    ("family", "name"), CASES, ids=lambda x: x if isinstance(x, str) else x.format.name
)
def test_a_reply_reads_the_same_however_it_is_grouped(family: Family, name: str) -> None:
    ids = family.encode(corpus(family)[name])
    whole, reason = parse(family, ids, [])
    check_sound(whole)
    two_groups = ([n] for n in range(1, len(ids), 1 + len(ids) // 10))
    for cuts in ([*range(len(ids))], [*range(0, len(ids), 3)], *two_groups):
        events, why = parse(family, ids, cuts)
        assert merged(events) == merged(whole)
        assert why == reason


@settings(deadline=None)
@given(st.data())
def test_any_tokens_in_any_groups_give_the_same_events(data: st.DataObject) -> None:
    """Markers, pieces of calls and other tokens in any order, cut off anywhere."""
    family = data.draw(st.sampled_from([GEMMA, QWEN]))
    pieces = [
        *corpus(family).values(),
        *family.format.markers.values(),
        "{",
        "}",
        '"',
        ",",
        "call:f{a:",
    ]
    text = st.sampled_from(pieces).map(family.encode)
    token = st.integers(0, family.tokenizer.backend.get_vocab_size() - 1).map(lambda i: [i])
    marker = st.sampled_from(list(family.format.markers.values())).map(family.encode)
    parts = data.draw(st.lists(st.one_of(text, token, marker), max_size=6))
    ids = [i for part in parts for i in part]
    ids = ids[: data.draw(st.integers(0, len(ids)))]
    options = {
        "reason": data.draw(st.sampled_from(["stop", "length"])),
        "calls": data.draw(st.booleans()),
        "stop_texts": data.draw(st.lists(st.sampled_from(["then", "\n", "se"]), max_size=2)),
    }
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=8))
    one_by_one, first = parse(family, ids, list(range(len(ids))), **options)
    grouped, second = parse(family, ids, cuts, **options)
    assert merged(grouped) == merged(one_by_one)
    assert first == second
    check_sound(grouped)


@settings(deadline=None)
@given(st.data())
def test_without_markers_everything_is_text(data: st.DataObject) -> None:
    family = data.draw(st.sampled_from([GEMMA, QWEN]))
    markers = set(family.encode("".join(family.format.markers.values())))
    size = family.tokenizer.backend.get_vocab_size()
    ids = data.draw(
        st.lists(st.integers(0, size - 1).filter(lambda i: i not in markers), max_size=20)
    )
    stops = data.draw(st.lists(st.sampled_from(["a", "\n", " the"]), max_size=2))
    events, _ = parse(family, ids, list(range(0, len(ids), 3)), stop_texts=stops)
    assert message_of(events)["content"] == completed_text(family.tokenizer, ids, stops)


values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=12),
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.from_regex(r"[a-z_]+", fullmatch=True), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([GEMMA, QWEN]),
    st.lists(
        st.dictionaries(st.from_regex(r"\w+", fullmatch=True), values, max_size=4),
        min_size=1,
        max_size=3,
    ),
)
def test_arguments_come_back(family: Family, calls: list[dict[str, Any]]) -> None:
    """Whatever strings hold, markers of the format apart: as tokens they are markers."""
    texts = [family.call(f"f{i}", arguments) for i, arguments in enumerate(calls)]
    if any("<" in json.dumps(arguments) for arguments in calls):
        return
    events, reason = parse(family, [i for t in texts for i in family.encode(t)], [])
    made = message_of(events)["tool_calls"]
    assert [json.loads(c["function"]["arguments"]) for c in made] == calls
    assert [c["function"]["name"] for c in made] == [f"f{i}" for i in range(len(calls))]
    assert reason == "tool_calls"


@FAMILIES
def test_reasoning_answer_and_calls_are_told_apart(family: Family) -> None:
    text = family.thought("Hm.\nYes.") + "I look.\n" + family.call("weather", {"city": "Oslo"})
    assert read(family, text + family.end) == [
        Reasoning("Hm.\nYes."),
        Text("I look."),
        ToolCallStart(0, "call-0", "weather"),
        ToolCallArguments(0, '{"city":"Oslo"}'),
        ToolCallEnd(0),
    ]


@FAMILIES
def test_arguments_stream_before_the_call_ends(family: Family) -> None:
    """A client sees a long file as it is written. Each state is the beginning of valid JSON."""
    ids = family.encode(family.call("write", {"text": "the a b ab c a\n the c b", "n": 12}))
    parser = parser_for(family.tokenizer)
    pieces = [parser.push([i]) for i in ids]
    deltas = ["".join(e.json_delta for e in p if isinstance(e, ToolCallArguments)) for p in pieces]
    assert sum(map(bool, deltas)) > 6
    assert next(i for i, p in enumerate(pieces) if ToolCallEnd(0) in p) >= len(ids) - 3
    # A number may go on, so it waits for what follows it.
    assert not any(d.endswith("1") for d in itertools.accumulate(deltas))


@FAMILIES
def test_a_call_that_generation_cuts_is_never_presented_as_complete(family: Family) -> None:
    """What the model wrote is the answer's text, so that a reader sees it."""
    marker = family.format.markers["call"]
    ids = family.encode(family.call("weather", {"city": "Oslo", "days": 3}))
    for n in range(len(ids)):
        for reason in ("length", "cancelled"):
            events, why = parse(family, ids[:n], [], reason)
            check_sound(events)
            assert why == reason
            written = family.tokenizer.backend.decode(ids[:n], skip_special_tokens=False)
            complete = any(isinstance(e, ToolCallEnd) for e in events)
            assert complete == (
                family.tokenizer.decode(ids[:n]).strip().endswith("}}" if family is QWEN else "}")
            )
            wanted = None if complete else written.removeprefix(marker).strip()
            assert message_of(events)["content"] == wanted


@FAMILIES
def test_a_malformed_call_is_text(family: Family) -> None:
    call, end = family.format.markers["call"], family.format.markers["end call"]
    assert read(family, f"{call}what is the weather?{end}") == [Text("what is the weather?")]
    begun = family.call("weather", {"city": "Oslo"})[: -len(end) - (1 if family is GEMMA else 3)]
    events, reason = parse(family, family.encode(begun + ";;" + end + "so"), [])
    assert any(isinstance(event, ToolCallBroken) for event in events)
    assert reason == "stop"
    raw = begun.removeprefix(call).strip() + ";;"
    assert message_of(events) == {"role": "assistant", "content": raw + "so"}


# Arguments that models have been seen to write beside what their templates write.
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{<|"|>a b<|"|>:1}', {"a b": 1}),
        ('{"a":"x\\n\\u00e9"}', {"a": "x\né"}),
        ("{ a : [ 1 , 2 ] , b : { } }", {"a": [1, 2], "b": {}}),
        (
            "{a:Oslo,b:12:30,c:New York ,d:007}",
            {"a": "Oslo", "b": "12:30", "c": "New York", "d": "007"},
        ),
        ("{a:1e5,b:-0.5,c:null,d:false}", {"a": 1e5, "b": -0.5, "c": None, "d": False}),
    ],
)
def test_gemma_writes_loosely(arguments: str, expected: dict[str, Any]) -> None:
    events, _ = parse(GEMMA, GEMMA.encode(f"<|tool_call>call:f{arguments}<tool_call|>"), [])
    (call,) = message_of(events)["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == expected


@pytest.mark.parametrize("header", ["call:f", "call: f ", ":f", "f", " call:f"])
def test_gemma_writes_headers_loosely(header: str) -> None:
    (call,) = message_of(read(GEMMA, f"<|tool_call>{header}{{}}<tool_call|>"))["tool_calls"]
    assert call["function"]["name"] == "f"


def test_gemma_s_call_without_a_name_is_none() -> None:
    assert "tool_calls" not in message_of(read(GEMMA, "<|tool_call>call:{}<tool_call|>"))


@pytest.mark.parametrize(
    "arguments",
    ["{a}", "{a:}", "{:1}", "{a:1,,}", "{,}", "{a:[1}", "{a:1 b{", "{a:1,", '{"a', "[1]", ""],
)
def test_gemma_s_arguments_that_cannot_be_read_are_no_call(arguments: str) -> None:
    events, reason = parse(GEMMA, GEMMA.encode(f"<|tool_call>call:f{arguments}<tool_call|>"), [])
    assert reason == "stop"
    assert "tool_calls" not in message_of(events)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{"arguments": {"a": 1}, "name": "f"}', {"a": 1}),
        ('{"name": "f", "id": [{"x": 1}], "arguments": {"a": 1}}', {"a": 1}),
        ('{"name": "f", "arguments": "{\\"a\\": \\"x\\"}"}', {"a": "x"}),
        ('{"name": "f", "arguments": null}', {}),
        ('{"name": "f"}', {}),
    ],
)
def test_qwen_writes_loosely(body: str, expected: dict[str, Any]) -> None:
    (call,) = message_of(read(QWEN, f"<tool_call>\n{body}\n</tool_call>"))["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == expected


@pytest.mark.parametrize(
    "body",
    [
        '{"name": 1, "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "f", "name": "g"}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "1"}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": 01}}',
        '{"name": "f", "arguments": {"a": "x',
        '{"name": "f", "arguments": {"a": [1,',
        '{"name": "f", "arguments": {"a": 1},',
        '{"name": "f", "arguments": {"a": TRUE}}',
        pytest.param("[" * 3000, id="deeply nested"),
    ],
)
def test_qwen_s_bodies_that_cannot_be_read_are_no_call(body: str) -> None:
    events, reason = parse(QWEN, QWEN.encode(f"<tool_call>\n{body}\n</tool_call>"), [])
    assert reason == "stop"
    assert "tool_calls" not in message_of(events)


# What models write instead of well formed calls, and what it must mean.
SLIPS: list[tuple[Family, str, dict[str, Any]]] = [
    (GEMMA, "{a:1", {"a": 1}),
    (GEMMA, "{a:{b:[1,[2]", {"a": {"b": [1, [2]]}}),
    (GEMMA, "{a:1,}", {"a": 1}),
    (GEMMA, "{a:[1,2,],}", {"a": [1, 2]}),
    (GEMMA, "{a:True,b:False,c:None}", {"a": True, "b": False, "c": None}),
    (GEMMA, '{"a\\d":1}', {"a\\d": 1}),
    (GEMMA, "{a:1}}", {"a": 1}),
    (QWEN, '{"a": 1}', {"a": 1}),
    (QWEN, '{"a": {"b": "x"', {"a": {"b": "x"}}),
    (QWEN, '{"a": 1,}}', {"a": 1}),
    (QWEN, '{"a": 1},}', {"a": 1}),
    (QWEN, '{"a": [True, False, None]}}', {"a": [True, False, None]}),
    (QWEN, r'{"a": "\d+\.x \u12 \up\'s"}}', {"a": "\\d+\\.x \\u12 \\up's"}),
    (QWEN, r"""{'a': 'it\'s "so"'}}""", {"a": 'it\'s "so"'}),
    (QWEN, '{"a": 1}}}', {"a": 1}),
]


@pytest.mark.parametrize(("family", "arguments", "expected"), SLIPS)
def test_a_slip_that_leaves_no_doubt_is_repaired(
    family: Family, arguments: str, expected: dict[str, Any]
) -> None:
    name = "call:f" if family is GEMMA else '{"name": "f", "arguments": '
    marks = family.format.markers
    for end in (marks["end call"], marks["end call"] + "\n", family.end):
        ids = family.encode(f"{marks['call']}{name}{arguments}{end}")
        parser = parser_for(family.tokenizer)
        events = [e for i in ids for e in parser.push([i])]
        events += parser.finish("stop")
        check_sound(events)
        message = message_of(events)
        assert message["content"] is None
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == expected
        assert parser.finish_reason == "tool_calls"
        counts = parser.complete_calls, parser.repaired_calls, parser.broken_calls
        assert counts == (1, 1, 0)


@FAMILIES
def test_a_call_that_was_cut_is_not_repaired(family: Family) -> None:
    """Who knows what the model would have written. The same at a stop id inside the call."""
    call = family.call("f", {"a": 1})
    ids = family.encode(call[: call.index("1") + 1])
    for reason in ("length", "stop"):
        parser = parser_for(family.tokenizer)
        message = message_of(parser.push(ids) + parser.finish(reason))
        assert "tool_calls" not in message
        assert "f" in message["content"]
        assert (parser.complete_calls, parser.broken_calls) == (0, 1)


@FAMILIES
def test_a_reply_begins_where_the_prompt_ends(family: Family) -> None:
    """Some templates open the reasoning. A turn of the user that names a marker opens nothing."""
    marks, turn = family.format.markers, family.format.turn
    open_thought = f"{turn}model\n{marks['think']}{family.format.header or chr(10)}"
    for prompt, wanted in {
        open_thought: [Reasoning("so"), Text("yes")],
        open_thought + "hm": [Reasoning("so"), Text("yes")],
        f"{turn}user\nwhat is {marks['think']}?{turn}model\n": [Text("so"), Text("yes")],
        f"{turn}model\n" + family.thought(""): [Text("so"), Text("yes")],
    }.items():
        events = read(family, f"so{marks['end think']}yes", prompt=family.encode(prompt))
        assert events == merged(wanted), prompt


@FAMILIES
def test_a_stop_text_is_one_of_the_answer(family: Family) -> None:
    """Reasoning and calls may have it, and so may the newlines that belong to the format."""
    stops = ["\n", "END"]
    reply = family.thought("one\nEND two") + "so END it"
    call = family.call("f", {"a": "END\nb"})
    for text, wanted, stop in (
        (reply, {"content": "so ", "reasoning": "one\nEND two"}, "END"),
        (family.thought("") + "Hello" + family.end, {"content": "Hello"}, None),
        (family.thought("") + "Hello\nyou", {"content": "Hello"}, "\n"),
        (f"E{call}ND", {"content": "END"}, None),
        (call + "a\n", {"content": "a"}, "\n"),
    ):
        ids = family.encode(text)
        ends = StopText(family.tokenizer, (), stops, calls=True)
        keep = next((n for n in range(1, len(ids) + 1) if ends(ids[:n]) is not None), None)
        parser = parser_for(family.tokenizer, stop_texts=stops)
        message = message_of(parser.push(ids[:keep]) + parser.finish("length"))
        message.pop("tool_calls", None)
        assert message == {"role": "assistant", **wanted}
        assert parser.stop_text == stop
        assert (parser.finish_reason == "length") == (stop is None)


@FAMILIES
def test_without_tools_calls_are_text(family: Family) -> None:
    events = read(family, family.call("f", {"a": 1}) + family.end, calls=False)
    assert [type(e) for e in events] == [Text]


def test_a_tokenizer_without_markers_makes_everything_text() -> None:
    from jaxspec.tokenizer import Tokenizer
    from tests.text.chat.models import BUNDLED

    bundled = Tokenizer.load(BUNDLED.parent)
    assert format_of(bundled) is None
    parser = parser_for(bundled)
    text = "<think>\nx\n</think> <tool_call>{}</tool_call>\n"
    events = parser.push(bundled.encode_rendered(text)) + parser.finish("length")
    assert merged(events) == [Text(text)]
    assert parser.finish_reason == "length"


def test_arguments_of_all_kinds_are_in_the_corpus() -> None:
    for family in (GEMMA, QWEN):
        calls = message_of(read(family, corpus(family)["parallel calls"]))["tool_calls"]
        assert [json.loads(c["function"]["arguments"]) for c in calls] == ARGUMENTS


def test_chat_knows_no_arrays() -> None:
    """A client of the library can read replies without starting JAX."""
    others = r"jax|numpy|flax|jaxspec\.(?!text\.|options|tokenizer)"
    assert _importers("jaxspec/text/chat", others) == []
    assert _importers("jaxspec/text/grammars", "jax", at_import_only=True) == [
        "jaxspec/text/grammars/automaton.py",
        "jaxspec/text/grammars/masking.py",
        "jaxspec/text/grammars/tables.py",
    ]
