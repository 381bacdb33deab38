"""Conversations become prompts, by templates that do what those of Gemma 4 and Qwen3 are known to do."""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

import pytest

from jaxspec.options import FieldError
from jaxspec.text.chat import FirstCall, choose, force, merged, message_of, parser_for, render
from jaxspec.text.chat.declarations import for_gemma
from jaxspec.tokenizer import Tokenizer, TokenizerError
from tests.text.chat.models import GEMMA, QWEN, Family, corpus, parse

# What matters of the two templates, and no more: BOS; how turns, thoughts, calls, results and parameters
# are written; that results are found by looking behind a call, and what is written of a parameter; that
# arguments must be values; that reasoning before the user's last message is left out.
GEMMA_TEMPLATE = """
{%- macro value(v) -%}
{%- if v is none -%}null{%- elif v is string -%}<|"|>{{ v }}<|"|>{%-
  elif v is boolean -%}{{ 'true' if v else 'false' }}
{%- elif v is mapping -%}{ {%-
  for k, x in v | dictsort %}{{ k }}:{{ value(x) }}{{ ',' if not loop.last }}{% endfor -%} }
{%- elif v is sequence -%}[{%- for x in v %}{{ value(x) }}{{ ',' if not loop.last }}{% endfor -%}]
{%- else -%}{{ v }}{%- endif -%}
{%- endmacro -%}
{%- macro parameters(properties) -%}
{%- for k, p in properties | dictsort -%}
{{ k }}:{description:{{ value(p['description'] or '') }}
{%- if p['type'] | upper == 'STRING' and p['enum'] %},enum:{{ value(p['enum']) }}{% endif -%}
{%- if p['type'] | upper == 'ARRAY' and p['items'] is mapping %},items:{{ value(p['items']) }}{% endif -%}
{{ ',nullable:true' if p['nullable'] }}
{%- if p['type'] | upper == 'OBJECT' -%}
,properties:{ {{- parameters(p['properties'] if p['properties'] is mapping else p) -}} }
{%- endif -%}
,type:{{ p['type'] | upper }}}
{%- endfor -%}
{%- endmacro -%}
<bos>{% if tools or enable_thinking or messages[0].role == 'system' -%}<|turn>system
{{ '<|think|>' if enable_thinking }}{{ messages[0].content if messages[0].role == 'system' }}{%
  for t in tools or [] %}[{{ t.function.name }}:{{ t.function.description }}{
    {{- parameters((t.function.parameters or {}).properties or {}) }}}]{% endfor %}<turn|>
{% endif -%}
{% set last = namespace(user=-1, role='', found=false) -%}
{% for m in messages if m.role == 'user' %}{% set last.user = messages.index(m) %}{% endfor -%}
{% for m in messages if m.role not in ('tool', 'system') -%}
    {% set place = messages.index(m) -%}
    {% if not (m.role == 'assistant' and last.role == 'tool') -%}<|turn>{{
      'model' if m.role == 'assistant' else m.role }}
{% endif -%}
    {% set last.role = m.role -%}
    {% if m.reasoning and place > last.user %}<|channel>thought
{{ m.reasoning }}
<channel|>{% endif -%}
    {% for c in m.tool_calls or [] -%}
      {% if c.function.arguments is not mapping %}{{ raise_exception('arguments must be a mapping') }}{% endif -%}
      <|tool_call>call:{{ c.function.name }}{{ value(c.function.arguments) }}<tool_call|>
    {%- endfor -%}
    {%- set last.found = m.tool_calls -%}
    {% for t in messages[place + 1:] -%}
      {%- if t.role != 'tool' %}{% set last.found = false %}{% endif -%}
      {%- if last.found -%}
        {%- set named = namespace(name='unknown') -%}
        {%- for c in m.tool_calls if c.id == t.tool_call_id %}{% set named.name = c.function.name %}{% endfor -%}
        <|tool_response>response:{{ named.name }}{value:{{ value(t.content) }}}<tool_response|>
        {%- set last.role = 'tool' -%}
      {%- endif -%}
    {%- endfor -%}
    {{ m.content | trim }}{% if last.role != 'tool' %}<turn|>
{% endif -%}
{% endfor -%}
{% if add_generation_prompt and last.role != 'tool' -%}<|turn>model
{% if not enable_thinking %}<|channel>thought
<channel|>{% endif %}{% elif add_generation_prompt and enable_thinking -%}<|channel>thought
{% endif -%}
"""
QWEN_TEMPLATE = """
{%- for t in tools or [] %}{{ t | tojson }}
{% endfor -%}
{% for m in messages -%}
  {% if m.role in ('user', 'system', 'assistant', 'tool') -%}
    <|im_start|>{{ m.role }}
{{ m.content }}
    {%- for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif -%}
{% endfor -%}
{% if add_generation_prompt -%}<|im_start|>assistant
{% if enable_thinking is false %}<think>

</think>

{% endif %}{% endif -%}
"""


def tokenizer_of(family: Family) -> Tokenizer:
    template = GEMMA_TEMPLATE if family is GEMMA else QWEN_TEMPLATE
    return Tokenizer(family.tokenizer.backend, chat_template=template)


def text_of(family: Family, messages: list[Any], tools: Any = None, **options: Any) -> str:
    ids = render(tokenizer_of(family), messages, tools, **options)
    return family.tokenizer.backend.decode(ids, skip_special_tokens=False)


USER = {"role": "user", "content": "a"}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
TIME = {"type": "function", "function": {"name": "time", "description": "The time."}}


def called(arguments: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }


def test_arguments_are_decoded_before_the_template_sees_them() -> None:
    """The protocol has JSON text. Gemma's template raises on it, and Qwen's would quote it again."""
    history = [USER, called('{"city": "Oslo", "days": [1, null]}')]
    assert 'call:weather{city:<|"|>Oslo<|"|>,days:[1,null]}<tool_call|>' in text_of(GEMMA, history)
    assert '"arguments": {"city": "Oslo", "days": [1, null]}}' in text_of(QWEN, history)
    assert "call:weather{}" in text_of(GEMMA, [USER, called("")])
    assert "call:weather{a:1}" in text_of(GEMMA, [USER, called({"a": 1})])


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content, **more}


def test_results_follow_their_calls() -> None:
    """Gemma's template looks for them there, and left out all others without a word."""
    hurry = {"role": "user", "content": "hurry"}
    told = '<tool_call|><|tool_response>response:weather{value:<|"|>b c<|"|>}<tool_response|>'
    answer = result("b c", tool_call_id="1")
    for history in (
        [USER, called("{}"), answer],
        [USER, called("{}"), hurry, answer],
        [USER, called("{}"), hurry, {"role": "assistant", "content": "soon"}, answer, USER],
        [USER, called("{}"), hurry, result("b c")],
        [USER, called("{}"), answer, USER, called('{"a": 1}'), hurry, answer],
    ):
        for family in (GEMMA, QWEN):
            rendered = text_of(family, history)
            assert "b c" in rendered
        assert told in text_of(GEMMA, history)
    assert text_of(GEMMA, [USER, called("{}"), hurry, answer]).index("b c") < 130


def test_calls_may_share_an_id() -> None:
    """Clients number the calls of each reply anew, or give all the same. The first result stood for all."""
    twice = called("{}")
    twice["tool_calls"] = [dict(twice["tool_calls"][0], id=""), dict(twice["tool_calls"][0], id="")]
    one, two = (result(text, tool_call_id="1") for text in ("b c", "c b"))
    for history in (
        [USER, called("{}"), one, called("{}"), two, USER],
        [USER, called("{}"), one, {"role": "assistant", "content": "a"}, USER, called("{}"), two],
        [USER, twice, one | {"tool_call_id": ""}, two | {"tool_call_id": ""}, USER],
    ):
        assert re.findall('value:<.".>(b c|c b)<', text_of(GEMMA, history)) == ["b c", "c b"]
        assert re.findall("b c|c b", text_of(QWEN, history)) == ["b c", "c b"]


def test_results_without_ids_are_those_of_the_calls_in_order() -> None:
    message = called("{}")
    message["tool_calls"].append({"function": {"name": "time", "arguments": "{}"}})
    for call in message["tool_calls"]:
        call.pop("id", None)
    rendered = text_of(GEMMA, [USER, message, result("b"), result(None), USER])
    assert 'response:weather{value:<|"|>b<|"|>}' in rendered
    assert 'response:time{value:<|"|><|"|>}' in rendered
    rendered = text_of(GEMMA, [USER, message, result("b", name="time"), result("c"), USER])
    assert 'response:time{value:<|"|>b<|"|>}' in rendered
    assert 'response:weather{value:<|"|>c<|"|>}' in rendered


def test_what_a_template_would_leave_out_is_refused() -> None:
    """A history whose beginning was cut off has results without calls."""
    late = {"role": "system", "content": "c"}
    for history, field, say in (
        ([USER, result("b", tool_call_id="9")], "messages[1]", "result of '9'.*have no call"),
        ([USER, called("{}"), USER, result("b", tool_call_id="9")], "messages[3]", "'9'"),
        ([USER, late], "messages[1]", "system message.*put it first"),
    ):
        with pytest.raises(FieldError, match=say) as caught:
            render(tokenizer_of(GEMMA), history)
        assert caught.value.field == field
        render(tokenizer_of(QWEN), history)


def test_a_call_that_a_stream_cut_is_taken_back() -> None:
    """Its arguments are the beginning of JSON. With a result it stays a call; else it is text."""
    cut = '{"city": "Os\\nlo", "days": [1, {"a'
    call = called(cut)
    for family in (GEMMA, QWEN):
        rendered = text_of(family, [USER, call, USER])
        assert f"weather{cut}" in rendered
        mark = family.format.markers["call"]
        assert mark not in rendered
        told = {**call, "content": 'so {"name": "weather", "arguments": {"city": '}
        assert f"weather{cut}" not in text_of(family, [USER, told, USER])
        rendered = text_of(family, [USER, call, result("no", tool_call_id="1"), USER])
        wanted = {"city": "Os\nlo", "days": [1, {}]}
        again = parse(family, family.encode(rendered[rendered.index(mark) :]), [])[0]
        made = message_of(again).get("tool_calls", [])
        assert [json.loads(c["function"]["arguments"]) for c in made] == [wanted]


# Parameters, and what Gemma's prompt says of them.
DECLARATIONS: list[tuple[Any, str]] = [
    (
        {"type": "string", "enum": ["a"]},
        'x:{description:<|"|><|"|>,enum:[<|"|>a<|"|>],type:STRING}',
    ),
    ({"type": ["integer", "null"]}, 'x:{description:<|"|><|"|>,nullable:true,type:INTEGER}'),
    ({"type": ["integer", "string"]}, "type:INTEGER | STRING}"),
    ({"anyOf": [{"type": "number"}, {"type": "null"}]}, ",nullable:true,type:NUMBER}"),
    (
        {"$ref": "#/$defs/Size", "description": "s"},
        '<|"|>s<|"|>,enum:[<|"|>b<|"|>,<|"|>c<|"|>],type:STRING}',
    ),
    (
        {"anyOf": [{"$ref": "#/$defs/Size"}, {"type": "null"}]},
        '<|"|>c<|"|>],nullable:true,type:STRING}',
    ),
    ({"allOf": [{"$ref": "#/$defs/Place"}]}, "properties:{city:{"),
    (
        {"prefixItems": [{"type": "integer"}, {"$ref": "#/$defs/Size"}]},
        '<|"|>Items in order: [{"type": "integer"}, {"type": "string", "enum": ["b", "c"]}].<|"|>,type:ARRAY}',
    ),
    (
        {"type": "object", "patternProperties": {"^a": {"enum": [1]}}},
        '{"^a": {"enum": [1], "type": "integer", "description": "One of: 1."}}.<|"|>,properties:{}',
    ),
    ({"enum": [1, 2]}, 'description:<|"|>One of: 1, 2.<|"|>,type:INTEGER}'),
    (
        {"type": "integer", "enum": [1, None], "description": "n"},
        '<|"|>n One of: 1.<|"|>,type:INTEGER}',
    ),
    ({"const": "k"}, 'enum:[<|"|>k<|"|>],type:STRING}'),
    ({"oneOf": [{"const": "k"}, {"enum": ["m"]}]}, 'enum:[<|"|>k<|"|>,<|"|>m<|"|>],type:STRING}'),
    ({"anyOf": [{"type": "integer"}, {"type": "boolean"}]}, "type:INTEGER | BOOLEAN}"),
    (
        {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "string"}]},
        '"properties": {"city": {"type": "string"}}',
    ),
    (
        {"type": "array", "items": {"$ref": "#/$defs/Size"}},
        'items:{enum:[<|"|>b<|"|>,<|"|>c<|"|>],type:',
    ),
    (
        {"type": "object", "additionalProperties": {"type": "integer"}},
        'Other values: {"type": "integer"}.',
    ),
    ({"type": "object", "additionalProperties": False}, ",properties:{},type:OBJECT}"),
    ({"properties": {"y": {"type": "null"}}}, ",properties:{y:{"),
    ({"$ref": "#/$defs/Tree"}, "The same form as Tree."),
    ({"$ref": "https://a/b", "description": "d"}, "d As in 'https://a/b'.<|\"|>"),
]


@pytest.mark.parametrize(("parameter", "wanted"), DECLARATIONS)
def test_gemma_s_prompt_has_the_types_of_parameters(parameter: Any, wanted: str) -> None:
    """Its template writes one type, and enums of strings. Qwen's writes the schema as it is."""
    schema = {
        "properties": {"x": parameter},
        "$defs": {
            "Size": {"type": "string", "enum": ["b", "c"]},
            "Place": {"type": "object", "properties": {"city": {"type": "string"}}},
            "Tree": {"type": "object", "properties": {"inner": {"$ref": "#/$defs/Tree"}}},
        },
    }
    tools = [
        {"type": "function", "function": {"name": "f", "description": "", "parameters": schema}}
    ]
    before = json.dumps(tools)
    assert wanted in text_of(GEMMA, [USER], tools)
    assert json.dumps(parameter) in text_of(QWEN, [USER], tools)
    assert json.dumps(tools) == before


def test_a_declaration_that_cannot_be_written_is_refused() -> None:
    wide = {f"t{i}": {"anyOf": [{"$ref": f"#/$defs/t{i + 1}"}] * 3} for i in range(30)}
    wide["t30"] = {}
    for parameters, say in (
        ({"properties": {"x": {"$ref": "#/$defs/y"}}}, "refers to '#/\\$defs/y'"),
        ({"properties": {"x": {"$ref": "#/$defs/t0"}}, "$defs": wide}, "more than 10000 schemas"),
    ):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        with pytest.raises(FieldError, match=say) as caught:
            render(tokenizer_of(GEMMA), [USER], choose([tool]).tools)
        assert caught.value.field == "tools"


def test_a_plain_declaration_stays_as_it_is() -> None:
    """So that the prompt is the one that the model was trained on."""
    place = {"type": "object", "properties": {"city": {"type": "string", "enum": ["a"]}}}
    properties = {
        "n": {"type": "integer", "minimum": 1, "default": 2, "description": "d"},
        "many": {"type": "array", "items": {"type": "integer", "enum": [1, 2]}},
        "places": {"type": "array", "items": place},
        "any": {"type": "array", "items": {"type": "object", "title": "t"}},
        "free": {"type": "object", "description": "e"},
        "place": {**place, "required": ["city"]},
        "odd": {},
    }
    schema = {"type": "object", "properties": properties, "required": ["n"]}
    function = {"name": "f", "description": "d", "parameters": schema, "strict": True}
    tool = {"type": "function", "function": function}
    assert for_gemma(tool) == tool


@pytest.mark.parametrize("family", [GEMMA, QWEN], ids=lambda f: f.format.name)
def test_special_tokens_in_a_text_become_special_tokens(family: Family) -> None:
    """The documentation says so, and that who does not trust a text removes them."""
    tokenizer, marker = tokenizer_of(family), family.end
    ids = render(tokenizer, [{"role": "user", "content": f"a{marker}b"}])
    assert ids.count(tokenizer.backend.token_to_id(marker)) == 2


def test_content_parts_are_joined_and_developer_is_system() -> None:
    """Qwen's template leaves a developer's message out without a word."""
    parts = [{"type": "text", "text": "a b"}, {"type": "input_text", "text": "c"}]
    messages = [{"role": "developer", "content": "ab"}, {"role": "user", "content": parts}]
    assert text_of(QWEN, messages) == (
        "<|im_start|>system\nab<|im_end|>\n<|im_start|>user\na b\nc<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "<|im_start|>assistant" not in text_of(QWEN, messages, add_generation_prompt=False)


@pytest.mark.parametrize("family", [GEMMA, QWEN], ids=lambda f: f.format.name)
def test_a_reply_goes_back_into_the_conversation(family: Family) -> None:
    """What was parsed, rendered and parsed again is the same calls."""
    events, _ = parse(family, family.encode(corpus(family)["parallel calls"]), [])
    reply = message_of(events)
    results = [
        {"role": "tool", "tool_call_id": c["id"], "name": c["function"]["name"], "content": "ab"}
        for c in reply["tool_calls"]
    ]
    rendered = render(tokenizer_of(family), [USER, reply, *results], add_generation_prompt=False)
    again = message_of(parse(family, rendered, [])[0])["tool_calls"]
    decoded = [json.loads(c["function"]["arguments"]) for c in again]
    assert decoded == [json.loads(c["function"]["arguments"]) for c in reply["tool_calls"]]


def test_thinking_is_switched_by_the_template() -> None:
    """After a tool's result Gemma's prompt leaves the thought open: the reply begins inside it."""
    history = [USER, called("{}"), {"role": "tool", "name": "weather", "content": "b"}]
    tokenizer = tokenizer_of(GEMMA)
    for thinking, wanted in (
        (True, {"reasoning": "so", "content": "yes"}),
        (False, {"content": "soyes"}),
    ):
        prompt = render(tokenizer, history, [WEATHER], enable_thinking=thinking)
        parser = parser_for(tokenizer, prompt)
        events = parser.push(GEMMA.encode("so<channel|>yes")) + parser.finish("stop")
        assert message_of(events) == {"role": "assistant", **wanted}
    assert "<think>\n\n</think>" in text_of(QWEN, [USER], enable_thinking=False)
    assert "<think>" not in text_of(QWEN, [USER], enable_thinking=True)


def test_earlier_reasoning_reaches_the_template() -> None:
    thought = {**called("{}"), "reasoning_content": "b c"}
    assert "<|channel>thought\nb c\n<channel|>" in text_of(GEMMA, [USER, thought])
    assert "b c" not in text_of(GEMMA, [thought, USER])


@pytest.mark.parametrize(
    ("messages", "field", "say"),
    [
        ([], "messages", "expected a list"),
        ("hi", "messages", "expected a list"),
        (["hi"], "messages[0]", "expected an object"),
        ([{"role": "robot", "content": "x"}], "messages[0].role", "expected one of system"),
        ([USER, {"role": "user"}], "messages[1].content", "is missing"),
        ([{"role": "user", "content": 3}], "messages[0].content", "expected text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
            "take_images",
        ),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0]", "with type"),
        ([USER, called('{"a" 1')], "messages[1].tool_calls[0].function.arguments", "no valid JSON"),
        ([USER, called('{"a": NaN}')], "messages[1].tool_calls[0].function.arguments", "NaN"),
        ([USER, called("[1]")], "messages[1].tool_calls[0].function.arguments", "an object"),
        ([USER, called("[" * 100_000)], "messages[1].tool_calls[0].function.arguments", "JSON"),
        ([{**called("{}"), "tool_calls": [{}]}], "messages[0].tool_calls[0]", "with function"),
    ],
)
def test_a_message_that_cannot_be_used_is_named(messages: Any, field: str, say: str) -> None:
    with pytest.raises(FieldError, match=say) as caught:
        render(tokenizer_of(GEMMA), messages)
    assert caught.value.field == field


def test_template_arguments_cannot_replace_the_template() -> None:
    """A request that sets `chat_template` would run a program of its own on the server."""
    for name in (
        "chat_template",
        "tokenize",
        "tools",
        "messages",
        "self",
        "continue_final_message",
    ):
        # Under test, types are checked by Python 3.11's `inspect`, which takes `tools` for an argument
        # by position.
        with pytest.raises(FieldError, match=name):
            inspect.unwrap(render)(tokenizer_of(QWEN), [USER], **{name: "x"})
    with pytest.raises(FieldError, match="no chat template"):
        render(QWEN.tokenizer, [USER])
    refusing = Tokenizer(QWEN.tokenizer.backend, chat_template="{{ raise_exception('no') }}")
    with pytest.raises(TokenizerError, match="refuses"):
        render(refusing, [USER])


def test_a_template_that_fails_on_what_a_client_sent_refuses_it() -> None:
    """Values nested so deeply that it recurses too far, and a schema that is none."""
    deep = "{" + '"a":[{' * 400 + "}]" * 400 + "}"
    with pytest.raises(TokenizerError, match="refuses these messages"):
        render(tokenizer_of(GEMMA), [USER, called(deep)])
    odd = Tokenizer(GEMMA.tokenizer.backend, chat_template="{{ tools[0].function.x.items() }}")
    with pytest.raises(TokenizerError, match="refuses these messages"):
        render(odd, [USER], [{"function": {"x": 1}}])


def test_tool_choice_says_who_hears_of_the_tools() -> None:
    both = [WEATHER, TIME]
    auto, none = choose(both), choose(both, "none")
    assert (auto.calls, auto.forced, len(auto.tools)) == (True, None, 2)
    assert (none.calls, none.forced, none.tools) == (False, None, ())
    assert choose(None, "auto") == choose(None) == choose([], "none")
    assert choose([TIME], "required").forced == "time"
    named = {"type": "function", "function": {"name": "time"}}
    flat = {"type": "function", "name": "time"}  # as /v1/responses has it
    assert choose(both, named).forced == choose(both, flat).forced == "time"
    assert choose([{"type": "function", "name": "f"}]).tools[0]["function"]["name"] == "f"
    # Gemma's template writes the description whether there is one or not.
    assert "[weather:{}]" in text_of(GEMMA, [USER], tools=auto.tools)


@pytest.mark.parametrize(
    ("tools", "choice", "field", "say"),
    [
        ([WEATHER, TIME], "required", "tool_choice", "weather, time.*needs a grammar"),
        (None, "required", "tool_choice", "no tools are declared"),
        (
            [TIME],
            {"type": "function", "function": {"name": "f"}},
            "tool_choice",
            "declared tools are time",
        ),
        ([TIME], "any", "tool_choice", 'expected "auto"'),
        ([{"type": "web_search"}], None, "tools[0]", "expected"),
        (
            [{"type": "function", "function": {"name": 'a"b'}}],
            None,
            "tools[0].function.name",
            "letters",
        ),
        ({}, None, "tools", "expected a list"),
    ],
)
def test_a_choice_that_cannot_be_kept_is_refused(
    tools: Any, choice: Any, field: str, say: str
) -> None:
    with pytest.raises(FieldError, match=say) as caught:
        choose(tools, choice)
    assert caught.value.field == field


@pytest.mark.parametrize("family", [GEMMA, QWEN], ids=lambda f: f.format.name)
@pytest.mark.parametrize("thinking", [True, False])
def test_a_forced_call_begins_in_the_prompt(family: Family, thinking: bool) -> None:
    """The model only writes the arguments. Events come as if it had written the whole call."""
    tokenizer = tokenizer_of(family)
    history = [USER, called("{}"), {"role": "tool", "name": "weather", "content": "b"}]
    for messages in ([USER], history):
        prompt = render(tokenizer, messages, [WEATHER], enable_thinking=thinking)
        forced = force(tokenizer, prompt, "weather")
        assert forced[: len(prompt)] == prompt
        whole = family.call("weather", {"city": "Oslo"})
        written = whole[whole.index("{" if family is QWEN else "city") :]
        written = written[written.index('{"city') :] if family is QWEN else written
        parser = parser_for(tokenizer, forced, call_id=lambda i: f"call-{i}")
        events = parser.push(family.encode(written)) + parser.finish("stop")
        assert merged(events) == merged(parse(family, family.encode(whole), [])[0])
        assert parser.finish_reason == "tool_calls"


@pytest.mark.parametrize("family", [GEMMA, QWEN], ids=lambda f: f.format.name)
def test_a_reply_may_end_behind_its_first_call(family: Family) -> None:
    """However its tokens come, and if an engine begins anew."""
    for name, reply in corpus(family).items():
        ids = family.encode(reply)
        found = []
        for size in (1, 3, 50):
            stop_at = FirstCall(family.tokenizer, ())
            stop_at(ids[:2])
            stops = [stop_at(ids[:count]) for count in range(1, len(ids) + size, size)]
            found.append(next((stop for stop in stops if stop is not None), None))
        assert len(set(found)) == 1, name
        whole = message_of(parse(family, ids, [])[0]).get("tool_calls", [])
        events, reason = parse(family, ids[: found[0]], [])
        calls = message_of(events).get("tool_calls", [])
        assert calls == whole[:1], name
        if calls and name != "a call in a call":
            assert reason == "tool_calls", name


def test_nothing_can_be_forced_without_markers() -> None:
    from tests.text.chat.models import BUNDLED

    with pytest.raises(FieldError, match="no markers"):
        force(Tokenizer.load(BUNDLED.parent), [1], "weather")
