"""The `openai` client, over loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.conftest import Live
from tests.serving.test_server import WORDS

openai = pytest.importorskip("openai")

BODY: dict[str, Any] = dict(
    model="tiny",
    max_tokens=20,
    temperature=WORDS["temperature"],
    top_p=1.0,
    seed=3,
    logit_bias=WORDS["logit_bias"],
    extra_body={"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "return_token_ids": True},
)
MESSAGES = [{"role": "user", "content": "a b"}]


@pytest.fixture
def client(live: Live) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{live.client.base_url}/v1", api_key="none", max_retries=0) as c:
        yield c


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "alias"]
    assert client.models.retrieve("tiny").owned_by == "jaxspec"


def test_completions(client: Any) -> None:
    whole = client.completions.create(prompt=["a b", "the"], n=2, logprobs=1, **BODY)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.usage.completion_tokens == 80
    texts = [""] * 4
    for chunk in client.completions.create(prompt=["a b", "the"], n=2, stream=True, **BODY):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert whole.choices[0].logprobs.text_offset[0] == 0


def test_chat(client: Any) -> None:
    whole = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=2, **BODY)
    (choice,) = whole.choices
    assert choice.finish_reason == "length"
    assert len(choice.logprobs.content) == 20
    stream = client.chat.completions.create(
        messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **BODY
    )
    text, usage, reasons = "", None, []
    for chunk in stream:
        usage = chunk.usage or usage
        for part in chunk.choices:
            text += part.delta.content or ""
            reasons.append(part.finish_reason)
    assert text == choice.message.content
    assert usage == whole.usage
    assert [reason for reason in reasons if reason] == ["length"]


def test_errors_are_of_the_client_s_own_classes(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as error:
        client.chat.completions.create(messages=MESSAGES, **{**BODY, "temperature": -1})
    assert error.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="the model 'other' does not exist"):
        client.completions.create(prompt="a", **{**BODY, "model": "other"})


def test_a_stream_that_is_closed_frees_its_row(client: Any, live: Live) -> None:
    stream = client.completions.create(prompt="a", stream=True, **{**BODY, "max_tokens": 110})
    next(iter(stream))
    stream.close()
    live.settle()


def test_many_coroutines(live: Live) -> None:
    async def ask(client: Any, seed: int) -> str:
        text = ""
        body = {**BODY, "seed": seed}
        async for chunk in await client.completions.create(prompt="a", stream=True, **body):
            text += chunk.choices[0].text
        return text

    async def ask_all(seeds: list[int]) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{live.client.base_url}/v1", api_key="x") as client:
            return list(await asyncio.gather(*(ask(client, seed) for seed in seeds)))

    together = asyncio.run(ask_all(list(range(8))))
    assert len(set(together)) == 8
    assert asyncio.run(ask_all([5])) == together[5:6]


# --- /v1/responses --------------------------------------------------------------------------------

RESPONSE: dict[str, Any] = dict(
    model="tiny",
    temperature=WORDS["temperature"],
    top_p=1.0,
    max_output_tokens=20,
    extra_body={
        "seed": 3,
        "logit_bias": WORDS["logit_bias"],
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    },
)


def test_responses(client: Any) -> None:
    """A whole reply, its stream and /v1/chat/completions agree."""
    whole = client.responses.create(input="a b", instructions="the", **RESPONSE)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.usage.output_tokens == 20
    kinds, numbers, text, last = [], [], "", None
    for event in client.responses.create(
        input=[{"role": "user", "content": [{"type": "input_text", "text": "a b"}]}],
        instructions="the",
        stream=True,
        **RESPONSE,
    ):
        kinds.append(event.type)
        numbers.append(event.sequence_number)
        text += event.delta if event.type == "response.output_text.delta" else ""
        last = event
    assert numbers == list(range(len(numbers)))
    assert text == whole.output_text != ""
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert last is not None
    assert last.response.output_text == text
    messages = [{"role": "system", "content": "the"}, {"role": "user", "content": "a b"}]
    chat = client.chat.completions.create(messages=messages, **BODY)
    assert chat.choices[0].message.content == text


def test_a_helper_that_puts_streams_together(client: Any) -> None:
    body = {**RESPONSE, "extra_body": {**RESPONSE["extra_body"], "stop": "the"}}  # it completes
    with client.responses.stream(input="a b", **body) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert final.status == "completed"
    assert "the" not in final.output_text


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"input": [{"type": "image"}]}, "input[0].type"),
        ({"input": [{"role": "boss", "content": "a"}]}, "input[0].role"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"max_output_tokens": 10_000}, "max_output_tokens"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format"),
    ],
)
def test_responses_that_are_refused(client: Any, wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(**{**RESPONSE, "input": "a", **wrong})
    assert error.value.param == param
