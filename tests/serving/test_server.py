"""Server over the tiny pair. Its replies are those of an offline engine."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jaxspec.engine.request import Completion, Request
from jaxspec.options import Sampling
from jaxspec.serving.handle import Handle
from jaxspec.serving.metrics import Metrics
from jaxspec.tokenizer import stop_at_text
from tests import tiny_pair as tiny
from tests.serving.conftest import Live
from tests.serving.fake_engine import FakeEngine

PROMPT = (tiny.BOS, 262, 263, 264, 265)
GREEDY: dict[str, Any] = dict(temperature=0, repetition_penalty=1.0, return_token_ids=True)
# Four words, drawn with a seed: text that can be read, of which no two places are alike.
WORDS: dict[str, Any] = dict(
    temperature=1.5,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
    logit_bias={"266": 60, "267": 60, "270": 60, "271": 60},
    seed=1,
    return_token_ids=True,
)


def events(live: Live, path: str, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream."""
    with live.client.stream("POST", path, json={**body, "stream": True}) as reply:
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in reply.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def of_choice(chunks: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    return [c for event in chunks for c in event["choices"] if c["index"] == index]


# --- tokens ---------------------------------------------------------------------------------------


def test_one_prompt_several_times_gives_several_replies(live: Live) -> None:
    """Equal prompts give different replies without a seed, and equal ones with a seed."""
    # So hot that all tokens are about as likely: 12 are never the same twice.
    hot: dict[str, Any] = dict(temperature=100.0, logit_bias=None, ignore_eos=True)
    body: dict[str, Any] = {**WORDS, **hot, "max_tokens": 12, "n": 2}

    def replies(**more: Any) -> list[tuple[int, ...]]:
        reply = live.post("/v1/completions", prompt=[list(PROMPT)] * 3, **{**body, **more})
        return [tuple(choice["token_ids"]) for choice in reply.json()["choices"]]

    assert len(set(replies(seed=None))) == 6
    first, second, *others = replies()
    assert first != second
    assert others == [first, second] * 2


def test_many_clients_get_what_each_would_get_alone(live: Live) -> None:
    """Streams and whole replies, greedy and sampled, more than there are slots, all at once."""
    cases = []
    for i in range(12):
        prompt = PROMPT[: 2 + i % 4]
        sampling = Sampling(temperature=i % 3 * 0.7, top_k=i % 5, repetition_penalty=1.0 + i % 2)
        cases.append((prompt, sampling, 5 + 3 * i))

    def ask(i: int) -> tuple[int, ...]:
        prompt, sampling, count = cases[i]
        body: dict[str, Any] = dict(
            prompt=list(prompt),
            max_tokens=count,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            repetition_penalty=sampling.repetition_penalty,
            top_p=1.0,
            min_p=0.0,
            seed=i,
            ignore_eos=True,
            return_token_ids=True,
        )
        if i % 2:
            (choice,) = live.post("/v1/completions", **body).json()["choices"]
            return tuple(choice["token_ids"])
        pieces = of_choice(events(live, "/v1/completions", **body))
        return tuple(token for piece in pieces for token in piece["token_ids"])

    with ThreadPoolExecutor(12) as threads:
        ids = list(threads.map(ask, range(len(cases))))
    asked = [
        Request(prompt, count, sampling, seed=i, sample=0)
        for i, (prompt, sampling, count) in enumerate(cases)
    ]
    assert ids == [done.token_ids for done in live.alone(*asked)]
    live.settle()


def test_n_and_seeds(live: Live) -> None:
    """Choices of one request differ; the same seed gives the same choices again."""
    body: dict[str, Any] = dict(prompt="a b", n=3, max_tokens=12, **{**WORDS, "seed": 2**40 + 5})
    texts = [
        [c["text"] for c in live.post("/v1/completions", **body).json()["choices"]]
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3


def test_batched_prompts_of_texts_and_of_ids(live: Live) -> None:
    texts = ["a", "b the", "ab"]
    ids = [live.post("/tokenize", prompt=text).json()["tokens"] for text in texts]
    of_texts, of_ids = (
        live.post("/v1/completions", prompt=prompt, max_tokens=6, n=2, **GREEDY).json()
        for prompt in (texts, ids)
    )
    assert [c["index"] for c in of_texts["choices"]] == list(range(6))
    assert [c["text"] for c in of_texts["choices"]] == [c["text"] for c in of_ids["choices"]]
    assert [c["prompt_token_ids"] for c in of_texts["choices"]] == [i for i in ids for _ in (0, 1)]
    assert of_texts["usage"]["prompt_tokens"] == sum(map(len, ids))


# --- replies --------------------------------------------------------------------------------------


def test_a_stream_says_what_a_reply_says(live: Live) -> None:
    body: dict[str, Any] = dict(prompt="a b", max_tokens=40, logprobs=2, **WORDS)
    whole = live.post("/v1/completions", **body).json()
    chunks = events(live, "/v1/completions", **body, stream_options={"include_usage": True})
    assert {event["object"] for event in chunks} == {whole["object"]} == {"text_completion"}
    assert len({event["id"] for event in chunks}) == 1
    pieces, (choice,) = of_choice(chunks), whole["choices"]
    assert len(pieces) > 1
    assert "".join(piece["text"] for piece in pieces) == choice["text"]
    assert [p["finish_reason"] for p in pieces] == [None] * (len(pieces) - 1) + ["length"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [x for p in pieces if p["logprobs"] for x in p["logprobs"][name]]
        assert joined == choice["logprobs"][name], name
    assert len(choice["logprobs"]["tokens"]) == 40
    assert all(len(best) <= 2 for best in choice["logprobs"]["top_logprobs"])
    assert chunks[-1]["choices"] == []
    assert all(event["usage"] is None for event in chunks[:-1])
    usage = chunks[-1]["usage"]
    assert usage == whole["usage"]
    assert usage["completion_tokens"] == 40
    assert usage["total_tokens"] == usage["prompt_tokens"] + 40
    drafts = usage["completion_tokens_details"]
    assert min(drafts.values()) >= 0
    assert sum(drafts.values()) % 3 == 0  # three drafts in each step


def test_chat_in_pieces_and_whole(live: Live) -> None:
    body: dict[str, Any] = dict(
        messages=[{"role": "user", "content": [{"type": "text", "text": "a b"}]}],
        max_completion_tokens=20,
        logprobs=True,
        top_logprobs=1,
        **WORDS,
    )
    whole = live.post("/v1/chat/completions", **body).json()
    assert whole["object"] == "chat.completion"
    (choice,) = whole["choices"]
    assert choice["message"]["role"] == "assistant"
    chunks = events(live, "/v1/chat/completions", **body)
    assert {event["object"] for event in chunks} == {"chat.completion.chunk"}
    pieces = of_choice(chunks)
    assert pieces[0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(piece["delta"].get("content", "") for piece in pieces)
    assert text == choice["message"]["content"]
    joined = [x for p in pieces if p["logprobs"] for x in p["logprobs"]["content"]]
    assert joined == choice["logprobs"]["content"]
    assert len(joined) == 20
    assert all(entry["top_logprobs"][0]["logprob"] >= entry["logprob"] for entry in joined)
    assert pieces[-1]["finish_reason"] == choice["finish_reason"]


def test_the_template_gets_its_arguments(live: Live) -> None:
    messages = [{"role": "user", "content": "a"}]
    plain = live.post("/tokenize", messages=messages).json()
    thinking = live.post(
        "/tokenize", messages=messages, chat_template_kwargs={"enable_thinking": True}
    ).json()
    assert thinking["count"] > plain["count"]
    asked = live.post(
        "/v1/chat/completions",
        messages=messages,
        max_tokens=1,
        chat_template_kwargs={"enable_thinking": True},
        return_token_ids=True,
    ).json()
    assert asked["choices"][0]["prompt_token_ids"] == thinking["tokens"]


def test_stop_texts(live: Live) -> None:
    """The reply ends before the stop text, in streams too, and so does the row."""
    free = live.post("/v1/completions", prompt="a b", max_tokens=40, **WORDS).json()
    text = free["choices"][0]["text"]
    stop = text[21:27]
    assert text.index(stop) > 5
    body: dict[str, Any] = dict(prompt="a b", max_tokens=40, stop=["never", stop], **WORDS)
    (choice,) = live.post("/v1/completions", **body).json()["choices"]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    pieces = of_choice(events(live, "/v1/completions", **body))
    assert "".join(piece["text"] for piece in pieces) == choice["text"]
    assert pieces[-1]["stop_reason"] == stop
    whole = free["choices"][0]["token_ids"]
    stop_at = stop_at_text(live.serving_model.tokenizer, [stop])
    assert choice["token_ids"] == whole[: stop_at(whole)]


def test_stop_token_ids(live: Live) -> None:
    free = live.post("/v1/completions", prompt="a b", max_tokens=30, **WORDS)
    ids = free.json()["choices"][0]["token_ids"]
    (choice,) = live.post(
        "/v1/completions", prompt="a b", max_tokens=30, stop_token_ids=[ids[4]], **WORDS
    ).json()["choices"]
    assert choice["token_ids"] == ids[: ids.index(ids[4]) + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[4])


def test_biases_and_penalties_reach_the_engine(live: Live) -> None:
    biased = live.post(
        "/v1/completions", prompt="a", max_tokens=5, logit_bias={"262": 100}, **GREEDY
    )
    assert biased.json()["choices"][0]["token_ids"] == [262] * 5
    punished = live.post(
        "/v1/completions",
        prompt="a",
        max_tokens=20,
        logit_bias={"262": 100, "263": 90},
        frequency_penalty=2,
        **GREEDY,
    )
    sampling = Sampling(logit_bias={262: 100, 263: 90}, frequency_penalty=2)
    (alone,) = live.alone(Request((tiny.BOS, 263), 20, sampling))
    assert tuple(punished.json()["choices"][0]["token_ids"]) == alone.token_ids
    assert set(alone.token_ids) == {262, 263}


@pytest.mark.parametrize("max_tokens", [0, 1, 8])
def test_echo_has_the_log_probabilities_of_the_prompt(live: Live, max_tokens: int) -> None:
    """Tokens of a prompt have the log-probabilities that they have as new tokens."""
    free = live.post("/v1/completions", prompt=[2, 263], max_tokens=9, logprobs=3, **WORDS).json()
    (new,) = free["choices"]
    ids = [2, 263, *new["token_ids"]]
    body: dict[str, Any] = dict(prompt=ids, echo=True, logprobs=3, max_tokens=max_tokens, **WORDS)
    whole = live.post("/v1/completions", **body).json()
    (choice,) = whole["choices"]
    logprobs = choice["logprobs"]
    count = len(ids) + max_tokens
    assert {len(values) for values in logprobs.values()} == {count}
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][2:11] == pytest.approx(
        new["logprobs"]["token_logprobs"], abs=1e-4
    )
    assert choice["text"].startswith(live.serving_model.tokenizer.decode(ids))
    assert "".join(logprobs["tokens"]) == "<bos>" + choice["text"]
    assert whole["usage"]["completion_tokens"] == max_tokens
    pieces = of_choice(events(live, "/v1/completions", **body))
    assert "".join(piece["text"] for piece in pieces) == choice["text"]
    for name in logprobs:
        joined = [x for p in pieces if p["logprobs"] for x in p["logprobs"][name]]
        assert joined == logprobs[name], name


def test_prompt_logprobs_by_token_id(live: Live) -> None:
    ids = [2, 263, 266, 268]
    body: dict[str, Any] = dict(prompt=[ids, [2]], prompt_logprobs=2, max_tokens=0)
    prompts = [c["prompt_logprobs"] for c in live.post("/v1/completions", **body).json()["choices"]]
    assert prompts[1] == [None]
    assert prompts[0][0] is None
    for own, row in zip(ids[1:], prompts[0][1:], strict=True):
        assert str(own) in row
        assert len(row) in (2, 3)
        assert row[str(own)]["logprob"] <= max(entry["logprob"] for entry in row.values())


def test_echo_without_log_probabilities(live: Live) -> None:
    (choice,) = live.post("/v1/completions", prompt="a b", echo=True, max_tokens=0).json()[
        "choices"
    ]
    assert (choice["text"], choice["logprobs"]) == ("a b", None)


def test_tokens_and_back(live: Live) -> None:
    made = live.post("/tokenize", prompt="ab é", return_token_strs=True).json()
    assert made["tokens"][0] == tiny.BOS
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
    assert made["max_model_len"] == live.serving_model.max_model_len
    assert live.post("/detokenize", tokens=made["tokens"]).json() == {"prompt": "ab é"}
    for wrong in ([-1], [10**9], [2**70], [True], ["a"], 5):
        refused = live.post("/detokenize", tokens=wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")
    bare = live.post("/tokenize", prompt="ab é", add_special_tokens=False).json()
    assert bare["tokens"] == made["tokens"][0:] or bare["tokens"] == made["tokens"][1:]


def test_about_the_server(live: Live) -> None:
    assert live.client.get("/health").json() == {"status": "ready"}
    assert "version" in live.client.get("/version").json()
    models = live.client.get("/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["tiny", "alias"]
    assert live.client.get("/v1/models/alias").json()["max_model_len"] == 124
    assert live.client.get("/v1/models/other").status_code == 404


class Remembers(FakeEngine):
    """Engine that prefills a prompt once, and copies it for later choices."""

    def step(self) -> Any:
        def cached(event: Any) -> Any:
            name = event.id
            is_later = isinstance(event, Completion) and name != self.admitted[0]
            return dataclasses.replace(event, cached_tokens=2) if is_later else event

        return [cached(event) for event in super().step()]


def test_usage_counts_a_prompt_once_and_what_was_not_read_of_it(fake: Callable[..., Live]) -> None:
    """Choices of a request share their prompt, so its cached tokens count once."""
    live = fake(Remembers())
    asked: dict[str, Any] = dict(prompt="a b", max_tokens=4)
    usage = live.post("/v1/completions", n=3, **asked).json()["usage"]
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (3, 0)
    usage = live.post("/v1/completions", n=3, **asked).json()["usage"]
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (3, 2)
    text = live.client.get("/metrics").text
    assert 'vllm:prefix_cache_queries_total{model_name="tiny"} 18.0' in text
    assert 'vllm:prefix_cache_hits_total{model_name="tiny"} 10.0' in text


def test_counts_have_the_names_that_dashboards_know(live: Live) -> None:
    def counts() -> dict[str, float]:
        lines = live.client.get("/metrics").text.splitlines()
        return {
            line.split("{")[0]: float(line.split()[-1])
            for line in lines
            if not line.startswith("#")
        }

    live.settle()
    before = counts()
    live.post("/v1/completions", prompt="a b", max_tokens=20, ignore_eos=True, **GREEDY)
    live.settle()
    after = counts()
    rise = {name: after[name] - before.get(name, 0) for name in after}
    assert rise["vllm:generation_tokens_total"] == 20
    assert rise["vllm:prompt_tokens_total"] == 3
    assert rise["vllm:time_to_first_token_seconds_count"] == 1
    assert rise["vllm:inter_token_latency_seconds_count"] == 19
    drafts = rise["vllm:spec_decode_num_drafts_total"]
    assert rise["vllm:spec_decode_num_draft_tokens_total"] == 3 * drafts > 0
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0


def test_steps_are_counted_by_the_drafts_that_they_verified() -> None:
    metrics = Metrics("tiny")
    done = Completion(0, (7,) * 8, "stop", (4, 1, 1, 1), verify_lengths=(3, 0, 0, 1))
    handle = Handle(Request(PROMPT, 8), lambda handle: None)
    handle.first_token_s = 0.1
    metrics.done(handle, done)
    text = metrics.text(0, 0, 1, 3).decode()
    assert 'jaxspec:verify_steps_total{draft_length="0",model_name="tiny"} 2.0' in text
    assert 'jaxspec:verify_steps_total{draft_length="3",model_name="tiny"} 1.0' in text


# --- refusals -------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, -5]}, "prompt"),
    ({"prompt": ["a", [1]]}, "prompt"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 5.5}, "max_tokens"),
    ({"max_tokens": 1000}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 1e39}, "temperature"),
    ({"repetition_penalty": 1e-38}, "repetition_penalty"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"seed": 2**64}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"logit_bias": {"7": 100.5}}, "logit_bias"),
    ({"logit_bias": {"1_0": 1}}, "logit_bias"),
    ({"stop_token_ids": [5, 6, 7, 8, 9]}, "stop_token_ids"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"allowed_token_ids": [5]}, "allowed_token_ids"),
    ({"bad_words": ["a"]}, "bad_words"),
    ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"stop_token_ids": list(range(10))}, "stop_token_ids"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"100000": 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(5)}}, "logit_bias"),
    ({"logprobs": 4}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"priority": 2**40}, "priority"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"min_tokens": 3}, "min_tokens"),
    ({"suffix": "x"}, "suffix"),
    ({"echo": True, "max_tokens": -1}, "max_tokens"),
    ({"echo": True, "max_tokens": 0, "prompt": [10**6]}, "prompt"),
    ({"echo": True, "max_tokens": 0, "prompt": [[]]}, "prompt"),
    ({"prompt_logprobs": 4}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"best_of": 2}, "best_of"),
]


@pytest.mark.parametrize(("wrong", "param"), REFUSED, ids=lambda x: str(x)[:40])
def test_wrong_values_are_refused_by_name(live: Live, wrong: dict[str, Any], param: str) -> None:
    reply = live.post("/v1/completions", **{"prompt": "a", "max_tokens": 2, **wrong})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]


CHAT_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "a"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "boss", "content": "a"}]}, "messages[0].role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]",
    ),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 9}, "top_logprobs"),
    ({"max_completion_tokens": 1000}, "max_completion_tokens"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
    ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"chat_template": "a"}}, "chat_template_kwargs"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"reasoning_effort": 3}, "reasoning_effort"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "a", "format": "wav"}}, "audio"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"echo": True}, "echo"),
]
HARMLESS: list[dict[str, Any]] = [
    {"modalities": ["text"], "functions": [], "echo": False, "audio": None},
    {"store": True, "metadata": {"a": "b"}, "service_tier": "auto", "user": "me"},
    {"parallel_tool_calls": True, "reasoning_effort": "low", "prediction": None},
    {"min_tokens": 0, "skip_special_tokens": True, "use_beam_search": False, "bad_words": []},
]
"""Fields of chats with values that need no support."""


@pytest.mark.parametrize(("wrong", "param"), CHAT_REFUSED, ids=lambda x: str(x)[:40])
def test_wrong_chats_are_refused_by_name(live: Live, wrong: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, **wrong}
    reply = live.post("/v1/chat/completions", **body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize("fields", HARMLESS, ids=lambda x: next(iter(x)))
def test_what_asks_for_nothing_is_no_error(live: Live, fields: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "a"}]
    reply = live.post("/v1/chat/completions", messages=messages, max_tokens=1, **fields)
    assert reply.status_code == 200, reply.text


def test_seeds_may_have_a_sign(live: Live) -> None:
    """The protocol's are whole numbers of 64 bits with a sign."""

    def text(seed: int) -> str:
        body = {**WORDS, "seed": seed}
        return live.post("/v1/completions", prompt="a", max_tokens=8, **body).json()["choices"][0]

    assert text(-1) == text(2**32 - 1) == text(2**63 - 1) != text(1)


def test_what_is_unknown_is_ignored(live: Live) -> None:
    reply = live.post("/v1/completions", prompt="a", max_tokens=1, user="me", novelty={"x": [1]})
    assert reply.status_code == 200


def test_other_models_and_paths(live: Live) -> None:
    reply = live.post("/v1/completions", prompt="a", model="gpt-5")
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "model_not_found"
    assert live.post("/v1/completions", prompt="a", max_tokens=1, model="alias").json()["model"]
    for reply in (live.client.get("/v1/nothing"), live.client.get("/v1/completions")):
        assert reply.status_code in (404, 405)
        assert reply.json()["error"]["message"]
    assert len(live.client.get("/" + "a" * 5000).text) < 300


BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b'{"prompt": "\xff\xfe"}',
    b"[" * 100_000,
    b'{"prompt": ' + b"[" * 100_000,
    b'{"prompt": "\\ud800"}',
]


NUMBERS = [b'{"prompt": "a", "max_tokens": NaN}', b'{"prompt": "a", "temperature": 1e999}']


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *itertools.product(["/v1/completions", "/v1/chat/completions", "/tokenize"], BODIES),
        *itertools.product(["/v1/completions"], NUMBERS),
    ],
    ids=lambda value: str(value[:30]),
)
def test_malformed_bodies(live: Live, path: str, body: bytes) -> None:
    reply = live.client.post(path, content=body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert "Traceback" not in reply.text
