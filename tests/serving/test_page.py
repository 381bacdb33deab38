"""Chat page without a browser: its files, and the server's fields that it uses."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from jaxspec.engine.request import Completion, Request, Update
from jaxspec.serving.chat_page import FILES, FOLDER
from jaxspec.serving.parse_request import ParsedRequest, ServingModel
from jaxspec.serving.reply_format import ChatChoice, Usage
from jaxspec.serving.verify_steps import StepFormatter, StepSplitter
from tests import tiny_pair as tiny
from tests.serving.conftest import Live
from tests.serving.test_server import WORDS, events, of_choice
from tests.text.chat.models import QWEN

TEXTS = {path: (FOLDER / name).read_text(encoding="utf-8") for path, name in FILES.items()}
SCRIPTS = "".join(text for path, text in TEXTS.items() if path.endswith(".js"))


def test_the_page_needs_nothing_from_elsewhere(fake: Callable[..., Live]) -> None:
    live = fake()
    for path, text in TEXTS.items():
        reply = live.client.get(path)
        assert reply.text == text
        policy = reply.headers["content-security-policy"]
        assert policy.startswith("default-src 'none';")
        sources = {word for rule in policy.split(";") for word in rule.split()[1:]}
        assert sources == {"'none'", "'self'", "data:"}
        again = live.client.get(path, headers={"If-None-Match": reply.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    named = re.findall(r'(?:href|src)="(?!data:)([^"]+)"', TEXTS["/"])
    named += [f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', SCRIPTS)]
    assert {f"/{path}" for path in named} == set(FILES) - {"/"}
    assert {file.name for file in FOLDER.iterdir()} == set(FILES.values())
    everything = "".join(TEXTS.values()).replace("http://www.w3.org/2000/svg", "")
    assert "://" not in everything


def test_its_scripts_put_text_in_as_text_and_name_what_is_there(live: Live) -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", SCRIPTS)
    ids = set(re.findall(r'\bid="([^"]+)"', TEXTS["/"]))
    assert set(re.findall(r'\$\("([^"]+)"\)', SCRIPTS)) <= ids
    asked = set(re.findall(r'"(v1/[\w/]+|tokenize|health)"', SCRIPTS))
    assert asked == {"v1/chat/completions", "v1/completions", "v1/models", "tokenize", "health"}
    for path in asked:
        assert live.client.get(f"/{path}").status_code in (200, 405), path


def test_it_can_be_left_out_and_is_open_where_a_key_is_asked_for(fake: Callable[..., Live]) -> None:
    without = fake(no_page=True)
    assert [without.client.get(path).status_code for path in FILES] == [404] * len(FILES)
    locked = fake(api_key=("k",))
    assert [locked.client.get(path).status_code for path in FILES] == [200] * len(FILES)
    assert locked.client.get("/v1/models").status_code == 401


# --- steps ----------------------------------------------------------------------------------------


def test_tokens_are_split_into_steps_however_they_come() -> None:
    """The first token is the prompt's. A stop cuts a step; drafts beyond it do not count."""
    lengths = (3, 1, 4, 2)
    whole = [(1, 0), (3, 2), (1, 0), (4, 3), (2, 1)]
    assert StepSplitter().push(11, lengths) == whole
    split = StepSplitter()
    assert (
        split.push(4, lengths[:1]) + split.push(5, lengths[:2]) + split.push(11, lengths) == whole
    )
    assert StepSplitter().push(8, lengths) == [(1, 0), (3, 2), (1, 0), (3, 3)]
    assert StepSplitter().push(0, lengths) == []
    assert StepSplitter().push(3, ()) == [(1, 0)] * 3
    usage = Usage()
    done = Completion(0, (7,) * 8, "stop", lengths, verify_lengths=(3, 0, 3, 2))
    parsed = ParsedRequest(((1,),), (), 1, (), None)
    choice = ChatChoice(QWEN.tokenizer, parsed, 0)
    choice.parser.push(QWEN.encode("<think>ab"))
    usage.add(done, choice)
    details = usage.to_json()["completion_tokens_details"]
    assert details == {
        "reasoning_tokens": len(QWEN.encode("ab")),
        "accepted_prediction_tokens": 5,
        "rejected_prediction_tokens": 3,
    }


def test_updates_know_the_steps_so_far(live: Live) -> None:
    """The steps of an update are the first steps of the completion."""
    assert live.offline is not None
    outputs = list(live.offline.run([Request((tiny.BOS, 263), 20)]))
    done = outputs[-1]
    assert isinstance(done, Completion)
    for event in outputs[:-1]:
        assert isinstance(event, Update)
        count = len(event.acceptance_lengths)
        assert event.acceptance_lengths == done.acceptance_lengths[:count]
        assert len(event.token_ids) in (1 + sum(event.acceptance_lengths), 20)
        assert event.verify_lengths == done.verify_lengths[:count]
    assert len(done.verify_lengths) == len(done.acceptance_lengths)


def test_a_step_says_how_many_drafts_it_verified() -> None:
    """Drafts that the engine chose not to verify do not count as rejected."""
    done = Completion(0, (1, 2, 3, 4, 5), "length", (1, 2, 9), verify_lengths=(0, 1, 8))
    steps = StepFormatter(depth=7).push(done, [{}] * 5, {})["steps"]
    assert [(step["drafted"], step["accepted"]) for step in steps] == [
        (0, 0),
        (0, 0),
        (1, 1),
        (7, 1),
    ]
    two = StepFormatter(depth=7)
    first = dataclasses.replace(done, token_ids=(1, 2), acceptance_lengths=(1,))
    apart = two.push(first, [{}] * 2, {})["steps"] + two.push(done, [{}] * 3, {})["steps"]
    assert apart == steps


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_says_which_tokens_came_in_one_step(live: Live, path: str) -> None:
    """Steps are those of an engine alone. Without the field, events have no steps."""
    body: dict[str, Any] = dict(prompt="a b", max_tokens=30, stop=["the"], **WORDS)
    if path == "/v1/chat/completions":
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    body["logit_bias"] = {**body["logit_bias"], "271": 40}  # " the" comes late, and is held back
    plain = of_choice(events(live, path, **body))
    assert "jaxspec" not in json.dumps(plain)
    pieces = of_choice(events(live, path, **body, return_steps=True))
    shown = [piece["jaxspec"] for piece in pieces if "jaxspec" in piece]
    steps = [step for field in shown for step in field["steps"]]
    tokens = [token for step in steps for token in step["tokens"]]
    ids = [i for piece in plain for i in piece.get("token_ids", ())]
    assert [token["id"] for token in tokens] == ids

    def text(delta: dict[str, Any]) -> str:
        return delta.get("text", "") + delta.get("content", "")

    of_steps = "".join(map(text, tokens)) + "".join(text(field.get("rest", {})) for field in shown)
    assert of_steps == "".join(text(piece.get("delta", piece)) for piece in plain) != ""
    assert (steps[0]["drafted"], steps[0]["accepted"], len(steps[0]["tokens"])) == (0, 0, 1)
    depth = live.serving_model.spec.depth
    for step in steps[1:-1]:
        assert step["drafted"] == depth
        assert step["accepted"] == len(step["tokens"]) - 1
    whole = live.post(path, **body, return_steps=True).json()
    assert "jaxspec" not in whole["choices"][0]
    details = whole["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == sum(step["accepted"] for step in steps)


def test_the_page_may_say_all_that_it_says(serving_model: ServingModel, live: Live) -> None:
    """The page's default limit leaves half of the model's length to the prompt."""
    body = {
        "messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}],
        "max_completion_tokens": min(512, serving_model.max_model_len // 2),
        "temperature": 0.5,
        "seed": 2**32 - 1,
        "chat_template_kwargs": {"enable_thinking": False},
        "return_steps": True,
    }
    assert of_choice(events(live, "/v1/chat/completions", **body))[-1]["finish_reason"]
