"""Every field of the server, by the `openai` client, on each route, whole and as a stream.

Sampling is compared with an engine that runs alone. Reasoning and tools come from a scripted
engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

import pytest

from jaxspec.engine.request import Request
from jaxspec.options import Sampling
from jaxspec.serving.reply_format import LogprobsFormatter
from jaxspec.tokenizer import completed_text, stop_at_text
from tests import tiny_pair as tiny
from tests.serving.conftest import Live
from tests.serving.scripted import LENGTHS
from tests.text.chat.models import GEMMA, QWEN, Family

openai = pytest.importorskip("openai")

ROUTES = ("completions", "chat", "responses")
COUNT = 12
WORDS = {266: 60, 267: 60, 270: 60, 271: 60}
PLAIN = Sampling(temperature=1.5, logit_bias=WORDS)
OWN = {"top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "return_token_ids"}
"""Fields that the client does not know. They go into `extra_body`."""
FOREIGN = {"seed", "stop", "logit_bias", "presence_penalty", "frequency_penalty"}
"""Fields of /v1/responses that the client does not know."""
LIMIT = {
    "completions": "max_tokens",
    "chat": "max_completion_tokens",
    "responses": "max_output_tokens",
}


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{live.client.base_url}/v1", api_key="none", max_retries=0) as c:
        yield c


def ask(
    client: Any, route: str, prompt: Any = "a b", *, stream: bool = False, **fields: Any
) -> Any:
    """Send a request to a route. Fields that the client does not know go into `extra_body`."""
    extra = OWN if route != "responses" else OWN | FOREIGN
    body = {name: value for name, value in fields.items() if name not in extra}
    body |= {"model": "tiny", "stream": stream}
    body["extra_body"] = {name: value for name, value in fields.items() if name in extra}
    if route == "completions":
        return client.completions.create(prompt=prompt, **body)
    if route == "chat":
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return client.chat.completions.create(messages=messages, **body)
    return client.responses.create(input=prompt, **body)


def text_of(client: Any, route: str, *, stream: bool, **fields: Any) -> str:
    """Return the text of a whole or a streamed reply."""
    reply = ask(client, route, stream=stream, **fields)
    if route == "responses":
        if not stream:
            return reply.output_text
        return "".join(e.delta for e in reply if e.type == "response.output_text.delta")
    if not stream:
        (choice,) = reply.choices
        return choice.text if route == "completions" else choice.message.content
    parts = [choice for event in reply for choice in event.choices]
    if route == "completions":
        return "".join(part.text for part in parts)
    return "".join(part.delta.content or "" for part in parts)


@dataclass(frozen=True)
class Case:
    """A field, and the request of the engine that it makes."""

    says: dict[str, Any]
    means: Callable[[Request, Live], Request]


def sampled(**changes: Any) -> Callable[[Request, Live], Request]:
    return lambda request, live: replace(request, sampling=replace(request.sampling, **changes))


STOPS = [" the", " b"]


def stopped(request: Request, live: Live) -> Request:
    return replace(request, stop_at=stop_at_text(live.serving_model.tokenizer, STOPS))


EOS_TOO = {**{k: v for k, v in WORDS.items() if k != 266}, tiny.EOS: 61}
CASES = {
    "temperature": Case({"temperature": 0}, sampled(temperature=0)),
    "top_p": Case({"top_p": 0.3}, sampled(top_p=0.3)),
    "top_k": Case({"top_k": 1}, sampled(top_k=1)),
    "min_p": Case({"min_p": 0.9}, sampled(min_p=0.9)),
    "presence_penalty": Case({"presence_penalty": -2}, sampled(presence_penalty=-2)),
    "frequency_penalty": Case({"frequency_penalty": 2.0}, sampled(frequency_penalty=2.0)),
    "repetition_penalty": Case({"repetition_penalty": 1.2}, sampled(repetition_penalty=1.2)),
    "logit_bias": Case({"logit_bias": {"267": 100}}, sampled(logit_bias={267: 100})),
    "seed": Case({"seed": 2**40 + 9}, lambda request, live: replace(request, seed=9)),
    "stop": Case({"stop": STOPS}, stopped),
    "stop_token_ids": Case(
        {"stop_token_ids": [270]}, lambda request, live: replace(request, stop_ids=(tiny.EOS, 270))
    ),
    "eos": Case(
        {"logit_bias": {str(k): v for k, v in EOS_TOO.items()}}, sampled(logit_bias=EOS_TOO)
    ),
    "ignore_eos": Case(
        {"logit_bias": {str(k): v for k, v in EOS_TOO.items()}, "ignore_eos": True},
        lambda request, live: replace(
            request, stop_ids=(), sampling=replace(request.sampling, logit_bias=EOS_TOO)
        ),
    ),
    "limit": Case({"limit": 5}, lambda request, live: replace(request, max_new_tokens=5)),
}


@pytest.fixture(scope="module")
def alone(live: Live) -> dict[str, dict[str, str]]:
    """Replies of an engine alone to a text and a chat, by field; "plain" without any."""
    texts: dict[str, dict[str, str]] = {}
    for kind in ("completions", "chat"):
        plain = Request(ids_of(live, kind), COUNT, PLAIN, (tiny.EOS,), seed=3, sample=0)
        asked = {"plain": plain} | {n: case.means(plain, live) for n, case in CASES.items()}
        texts[kind] = {
            name: completed_text(
                live.serving_model.tokenizer, done.token_ids, STOPS * (name == "stop")
            )
            for name, done in zip(asked, live.alone(*asked.values()), strict=True)
        }
    return {**texts, "responses": texts["chat"]}


def ids_of(live: Live, route: str) -> tuple[int, ...]:
    """Return the ids of the prompt that `ask` gives a route."""
    chat = {"messages": [{"role": "user", "content": "a b"}]}
    asked = {"prompt": "a b"} if route == "completions" else chat
    return tuple(live.post("/tokenize", **asked).json()["tokens"])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", CASES)
def test_a_field_does_what_it_does_to_an_engine_alone(
    client: Any, alone: dict[str, dict[str, str]], route: str, name: str
) -> None:
    """The field changes the reply."""
    fields: dict[str, Any] = dict(
        temperature=1.5,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        repetition_penalty=1.0,
        logit_bias={str(k): v for k, v in WORDS.items()},
        seed=3,
        limit=COUNT,
    )
    fields |= CASES[name].says
    fields[LIMIT[route]] = fields.pop("limit")
    wanted = alone[route][name]
    assert wanted != alone[route]["plain"]
    assert text_of(client, route, stream=False, **fields) == wanted
    assert text_of(client, route, stream=True, **fields) == wanted


# --- choices, prompts, log-probabilities ----------------------------------------------------------


@pytest.mark.parametrize("route", ["completions", "chat"])
def test_n_choices_whole_and_streamed(client: Any, route: str) -> None:
    fields: dict[str, Any] = dict(n=3, seed=2, temperature=1.5, top_k=0, top_p=1.0)
    fields |= {LIMIT[route]: COUNT, "logit_bias": {str(k): v for k, v in WORDS.items()}}
    whole = ask(client, route, **fields)
    texts = dict.fromkeys(range(3), "")
    reasons = {}
    for event in ask(client, route, stream=True, **fields):
        for choice in event.choices:
            added = choice.text if route == "completions" else choice.delta.content
            texts[choice.index] += added or ""
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    for choice in whole.choices:
        content = choice.text if route == "completions" else choice.message.content
        assert (texts[choice.index], reasons[choice.index]) == (content, choice.finish_reason)
    assert len(set(texts.values())) == 3


def test_prompts_of_ids_in_batches_whole_and_streamed(client: Any) -> None:
    ids = [[tiny.BOS, 262], [tiny.BOS, 263, 264]]
    fields = dict(temperature=0, max_tokens=5, return_token_ids=True)
    whole = ask(client, "completions", ids, **fields)
    assert [choice.prompt_token_ids for choice in whole.choices] == ids
    (alone,) = ask(client, "completions", ids[1], **fields).choices
    assert alone.token_ids == whole.choices[1].token_ids
    streamed: list[list[int]] = [[], []]
    for event in ask(client, "completions", ids, stream=True, **fields):
        for choice in event.choices:
            streamed[choice.index] += choice.token_ids
    assert streamed == [choice.token_ids for choice in whole.choices]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_whole_and_streamed(client: Any, max_tokens: int) -> None:
    """Evaluations use this to find the log-probability of the best token."""
    ids = [tiny.BOS, 266, 267, 270]
    fields = dict(echo=True, logprobs=1, max_tokens=max_tokens, temperature=0)
    (whole,) = ask(client, "completions", ids, **fields).choices
    logprobs = whole.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(ids) + max_tokens
    assert logprobs.token_logprobs[0] is None
    assert all(len(best) == 1 for best in logprobs.top_logprobs[1:])
    parts = [c for e in ask(client, "completions", ids, stream=True, **fields) for c in e.choices]
    assert "".join(part.text for part in parts) == whole.text
    joined = [x for part in parts if part.logprobs for x in part.logprobs.token_logprobs]
    assert joined == logprobs.token_logprobs


def test_log_probabilities_of_a_chat_whole_and_streamed(client: Any) -> None:
    fields = dict(logprobs=True, top_logprobs=2, max_completion_tokens=6, temperature=0)
    fields["repetition_penalty"] = 1.0
    whole = ask(client, "chat", **fields).choices[0].logprobs.content
    parts = [c for e in ask(client, "chat", stream=True, **fields) for c in e.choices]
    assert [x for part in parts if part.logprobs for x in part.logprobs.content] == whole
    assert len(whole) == 6
    for entry in whole:
        assert bytes(entry.bytes).decode(errors="replace") == entry.token
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)
        assert len(entry.top_logprobs) == 2


@pytest.mark.parametrize("family", [QWEN, GEMMA], ids=["byte level", "byte tokens"])
def test_parts_of_characters_are_told_apart(family: Family) -> None:
    """All decode to U+FFFD. Chats show their bytes; completions show the best of them."""
    tokenizer = family.tokenizer
    formatter = LogprobsFormatter(tokenizer, top=2)
    ids = [i for i in family.encode("😀") if "\ufffd" in formatter._token(i)]
    assert len(ids) >= 2
    assert bytes(b for i in ids for b in formatter._entry(i, -1.0)["bytes"]).decode() == "😀"
    form = formatter.completion_logprobs(ids[:1], [-0.5], [((ids[0], -0.5), (ids[1], -3.0))], [0])
    assert form["top_logprobs"] == [{"\ufffd": -0.5}]
    whole = formatter._entry(tokenizer.encode("a")[-1], -1.0)
    assert bytes(whole["bytes"]).decode() == whole["token"]


@pytest.mark.parametrize("count", [1, 2])
def test_a_call_cannot_be_asked_of_a_model_without_markers(live: Live, count: int) -> None:
    """With several tools the choice was dropped, and the reply was text."""
    tools = [{"type": "function", "function": {"name": f"tool{i}"}} for i in range(count)]
    asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "tools": tools}
    reply = live.post("/v1/chat/completions", **asked, tool_choice="required")
    assert reply.status_code == 400, reply.text
    assert "no markers of calls" in reply.json()["error"]["message"]


@pytest.mark.parametrize("key", ["--5", "5-", "9" * 5000, "five"])
def test_keys_that_are_no_token_are_refused(live: Live, key: str) -> None:
    reply = live.post("/v1/completions", prompt=[1], max_tokens=1, logit_bias={key: 1})
    assert reply.status_code == 400, reply.text
    assert "logit_bias" in reply.json()["error"]["message"]


@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize("value", ["NaN", "1e999"])
def test_numbers_that_json_lacks_are_refused_where_a_reply_repeats_them(
    live: Live, value: str, stream: str
) -> None:
    body = f'{{"input": "x", "max_output_tokens": 1, "metadata": {{"a": {value}}}, '
    body += f'"stream": {stream}}}'
    reply = live.client.post(
        "/v1/responses", content=body, headers={"content-type": "application/json"}
    )
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == "metadata"


# --- usage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES)
def test_usage_whole_and_streamed(client: Any, live: Live, route: str) -> None:
    """Counts of tokens and accepted drafts are those of an engine alone."""
    fields: dict[str, Any] = {LIMIT[route]: 20, "temperature": 0, "ignore_eos": True}
    whole = ask(client, route, **fields).usage
    if route != "responses":
        options = {"stream_options": {"include_usage": True}}
        events = list(ask(client, route, stream=True, **options, **fields))
        assert [event.usage for event in events[:-1]] == [None] * (len(events) - 1)
        assert events[-1].choices == []
        usage = events[-1].usage
        without = ask(client, route, stream=True, **fields)
        assert all(event.usage is None for event in without)
        counts = (whole.prompt_tokens, whole.completion_tokens)
        cached, details = whole.prompt_tokens_details.cached_tokens, whole.completion_tokens_details
    else:
        *_, last = ask(client, route, stream=True, **fields)
        usage = last.response.usage
        counts = (whole.input_tokens, whole.output_tokens)
        cached, details = whole.input_tokens_details.cached_tokens, whole.output_tokens_details
    assert usage == whole or cached == 0  # a store of prefixes may have known the second prompt
    assert usage.total_tokens == whole.total_tokens == sum(counts)
    ids = ids_of(live, route)
    generation = live.serving_model.generation
    sampling = Sampling(repetition_penalty=generation.repetition_penalty)
    (alone,) = live.alone(Request(ids, 20, sampling))
    assert counts == (len(ids), 20)
    assert 0 <= cached <= len(ids)
    accepted = [min(length - 1, 20) for length in alone.acceptance_lengths]
    beyond = 1 + sum(alone.acceptance_lengths) - 20  # of the last step, its own token first
    assert details.accepted_prediction_tokens == sum(accepted) - max(0, beyond - 1)
    assert details.reasoning_tokens == 0


# --- reasoning and tools --------------------------------------------------------------------------

WEATHER = {"name": "weather", "parameters": {"type": "object"}}
TOOLS = [
    {"type": "function", "function": WEATHER},
    {"type": "function", "function": {**WEATHER, "name": "time"}},
]
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
ANSWER = (
    QWEN.thought("Two questions.")
    + "Let me see."
    + QWEN.call("weather", {"city": 'Oslo {"}'})
    + QWEN.call("time", {"zones": ["é", 1]})
)


@pytest.fixture
def written(scripted: Any) -> Iterator[Callable[..., tuple[Any, Live, Any]]]:
    """Return a client of a server with scripted replies."""
    clients = []

    def start(*replies: str) -> tuple[Any, Live, Any]:
        live, engine = scripted(*replies)
        made = openai.OpenAI(base_url=f"{live.client.base_url}/v1", api_key="x", max_retries=0)
        clients.append(made)
        return made, live, engine

    yield start
    for made in clients:
        made.close()


def test_reasoning_and_parallel_calls_of_a_chat(written: Any) -> None:
    client, _, _ = written(ANSWER)
    whole = ask(client, "chat", tools=TOOLS)
    (choice,) = whole.choices
    message = choice.message
    assert choice.finish_reason == "tool_calls"
    assert (message.reasoning, message.content) == ("Two questions.", "Let me see.")
    assert [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls] == [
        ("weather", {"city": 'Oslo {"}'}),
        ("time", {"zones": ["é", 1]}),
    ]
    assert len({call.id for call in message.tool_calls}) == 2
    details, count = whole.usage.completion_tokens_details, len(QWEN.encode(ANSWER))
    assert details.reasoning_tokens == len(QWEN.encode("\nTwo questions.\n"))
    is_draft = [index < length - 1 for length in LENGTHS for index in range(length)]
    accepted = sum(islice(cycle(is_draft), count - 1))
    assert details.accepted_prediction_tokens == accepted > 0
    assert details.rejected_prediction_tokens > 0
    content, reasoning, calls, reasons = "", "", {}, []
    for event in ask(client, "chat", tools=TOOLS, stream=True):
        for part in event.choices:
            content += part.delta.content or ""
            reasoning += getattr(part.delta, "reasoning", None) or ""
            reasons.append(part.finish_reason)
            for call in part.delta.tool_calls or []:
                if call.id:
                    calls[call.index] = [call.function.name, ""]
                calls[call.index][1] += call.function.arguments
    assert (content, reasoning) == (message.content, message.reasoning)
    assert calls == {
        i: [call.function.name, call.function.arguments]
        for i, call in enumerate(message.tool_calls)
    }
    assert [reason for reason in reasons if reason] == ["tool_calls"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["chat", "responses"])
def test_one_call_and_no_more(written: Any, route: str, stream: bool) -> None:
    """The reply ends behind the call, whatever the model would have written."""
    client, live, _ = written(ANSWER)
    tools = TOOLS if route == "chat" else FLAT
    reply = ask(client, route, tools=tools, parallel_tool_calls=False, stream=stream)
    if route == "responses":
        done = list(reply)[-1].response if stream else reply
        calls = [item for item in done.output if item.type == "function_call"]
        assert [(call.name, call.status) for call in calls] == [("weather", "completed")]
        assert (done.status, done.parallel_tool_calls) == ("completed", False)
    elif stream:
        parts = [choice for event in reply for choice in event.choices]
        calls = [call for part in parts for call in part.delta.tool_calls or ()]
        assert {call.index for call in calls} == {0}
        arguments = "".join(call.function.arguments for call in calls)
        assert json.loads(arguments) == {"city": 'Oslo {"}'}
        assert parts[-1].finish_reason == "tool_calls"
    else:
        (choice,) = reply.choices
        assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
        assert choice.finish_reason == "tool_calls"
        end = ANSWER.index("</tool_call>")
        assert reply.usage.completion_tokens <= len(QWEN.encode(ANSWER[:end]))
    live.settle()


def test_the_client_s_own_helper_puts_a_stream_together(written: Any) -> None:
    client, _, _ = written(ANSWER)
    messages = [{"role": "user", "content": "a"}]
    with client.chat.completions.stream(
        model="scripted",
        messages=messages,
        tools=TOOLS,
        stream_options={"include_usage": True},
        extra_body={"return_steps": True},
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Let me see."
    names = [call.function.name for call in final.choices[0].message.tool_calls]
    assert names == ["weather", "time"]
    assert final.usage.completion_tokens == len(QWEN.encode(ANSWER))


def test_reasoning_and_calls_of_a_response(written: Any) -> None:
    client, _, _ = written(ANSWER)
    whole = ask(client, "responses", tools=FLAT)
    assert [item.type for item in whole.output] == ["reasoning", "message", *["function_call"] * 2]
    reasoning, _, weather, time = whole.output
    assert reasoning.content[0].text == "Two questions."
    assert whole.output_text == "Let me see."
    assert json.loads(weather.arguments) == {"city": 'Oslo {"}'}
    assert time.name == "time"
    thought = len(QWEN.encode("\nTwo questions.\n"))
    assert whole.usage.output_tokens_details.accepted_prediction_tokens > 0
    assert whole.usage.output_tokens_details.reasoning_tokens == thought
    deltas: dict[int, str] = {}
    last = None
    for event in ask(client, "responses", tools=FLAT, stream=True):
        if event.type.endswith(".delta"):
            deltas[event.output_index] = deltas.get(event.output_index, "") + event.delta
        last = event
    assert last is not None
    assert last.type == "response.completed"
    assert [deltas[i] for i in range(4)] == [
        "Two questions.",
        "Let me see.",
        weather.arguments,
        time.arguments,
    ]
    assert last.response.usage == whole.usage


@pytest.mark.parametrize("route", ["chat", "responses"])
def test_results_of_tools_go_back_in(written: Any, route: str) -> None:
    """The client sends the reply back with the results, and the model goes on."""
    client, live, engine = written(ANSWER, "Rain at noon.")
    tools = TOOLS if route == "chat" else FLAT
    first = ask(client, route, tools=tools)
    if route == "chat":
        message = first.choices[0].message
        ids = [call.id for call in message.tool_calls]
        history = [
            {"role": "user", "content": "a b"},
            message.model_dump(exclude_none=True),
            *({"role": "tool", "tool_call_id": i, "content": f"wet {i}"} for i in ids),
        ]
        assert (
            ask(client, route, history, tools=tools).choices[0].message.content == "Rain at noon."
        )
    else:
        ids = [item.call_id for item in first.output if item.type == "function_call"]
        history = [
            {"role": "user", "content": "a b"},
            *(item.model_dump(exclude_none=True) for item in first.output),
            *({"type": "function_call_output", "call_id": i, "output": f"wet {i}"} for i in ids),
        ]
        assert ask(client, route, history, tools=tools).output_text == "Rain at noon."
    prompt = live.serving_model.tokenizer.decode(engine.asked[-1].prompt_ids)
    assert all(f"wet {i}" in prompt for i in ids)
    assert "Let me see." in prompt


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["chat", "responses"])
def test_tool_choice(written: Any, route: str, stream: bool) -> None:
    """Auto, none, required where there is one tool, and named."""
    tools = TOOLS if route == "chat" else FLAT
    named: dict[str, Any] = {"type": "function", "name": "time"}
    if route == "chat":
        named = {"type": "function", "function": {"name": "time"}}
    forced = ' {"zones": []}}\n</tool_call>'
    free = "Yes." + QWEN.call("time", {"zones": []})
    cases: list[tuple[Any, list[Any], str, list[str]]] = [
        ("auto", tools, free, ["time"]),
        ("none", tools, free, []),
        ("required", tools[:1], forced, ["weather"]),
        (named, tools, forced, ["time"]),
    ]
    client, live, engine = written(*(reply for _, _, reply, _ in cases))
    for choice, declared, _, wanted in cases:
        reply = ask(client, route, tools=declared, tool_choice=choice, stream=stream)
        assert names_of(reply, route, stream) == wanted, choice
        prompt = live.serving_model.tokenizer.decode(engine.asked[-1].prompt_ids)
        assert ("tools" in prompt) == (choice != "none")


def names_of(reply: Any, route: str, stream: bool) -> list[str]:
    if route == "responses":
        if stream:
            *_, last = reply
            reply = last.response
        return [item.name for item in reply.output if item.type == "function_call"]
    if not stream:
        return [call.function.name for call in reply.choices[0].message.tool_calls or []]
    parts = [call for e in reply for c in e.choices for call in c.delta.tool_calls or []]
    return [call.function.name for call in parts if call.id]


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_is_switched(written: Any, stream: bool) -> None:
    client, live, engine = written("Yes.")
    switch = {"enable_thinking": False}
    messages = [{"role": "user", "content": "a"}]
    body = {"extra_body": {"chat_template_kwargs": switch}, "model": "scripted", "stream": stream}
    for reply in (
        client.chat.completions.create(messages=messages, **body),
        client.responses.create(input="a", **body),
        client.responses.create(
            input="a", reasoning={"effort": "none"}, model="scripted", stream=stream
        ),
    ):
        list(reply)
    prompts = [live.serving_model.tokenizer.decode(request.prompt_ids) for request in engine.asked]
    assert ["thinking False" in prompt for prompt in prompts] == [True] * 3


# --- refusals -------------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"seed": 2**64}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"presence_penalty": "high"}, "presence_penalty"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
    ({"model": "other"}, "model"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_wrong_values_raise_the_client_s_own_errors(client: Any, route: str, stream: bool) -> None:
    """Streams are refused before they begin. Unknown fields are ignored."""
    for wrong, param in WRONG:
        body = {"stream": stream, "extra_body": {**wrong, "novelty": [{"x": None}]}}
        with pytest.raises(openai.APIStatusError) as raised:
            complete(client, route, body)
        assert raised.value.status_code == (404 if param == "model" else 400)
        assert raised.value.param == param
    assert complete(client, route, {"extra_body": {"novelty": [{"x": None}], LIMIT[route]: 1}})


def complete(client: Any, route: str, body: dict[str, Any]) -> Any:
    if route == "completions":
        return client.completions.create(model="tiny", prompt="a", **body)
    if route == "chat":
        messages = [{"role": "user", "content": "a"}]
        return client.chat.completions.create(model="tiny", messages=messages, **body)
    return client.responses.create(model="tiny", input="a", **body)
