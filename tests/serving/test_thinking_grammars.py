"""Grammars with reasoning: a reply may think first; its answer or calls follow the grammar.

Models with random weights, whose tokenizers have the markers of a family. They are biased to end
what they begin.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from jaxspec.configs.base import GenerationDefaults
from jaxspec.configs.gemma4 import Gemma4Config
from jaxspec.engine.engine import Engine
from jaxspec.models.gemma4 import Gemma4
from jaxspec.options import ProgramFeatures
from jaxspec.serving.parse_request import ServingModel
from jaxspec.serving.settings import Settings
from jaxspec.tokenizer import Tokenizer
from jaxspec.weights.model_def import ModelDef
from tests import fakes, tiny
from tests.serving.conftest import Live, no_scores, run_server
from tests.text.chat.models import GEMMA, QWEN, Family

pytest.importorskip("llguidance")
from jaxspec.text.grammars import GrammarTokens

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": [1, 22]}},
    "required": ["a"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
LENGTH = 160
pytestmark = pytest.mark.slow  # engines of its own; the rules alone are in tests/text/chat


@dataclasses.dataclass(frozen=True)
class Thinking:
    """A server of a family, and the logit biases of its requests."""

    family: Family
    live: Live
    biases: dict[str, float]

    def post(self, **body: Any) -> Any:
        fields = {"messages": [{"role": "user", "content": "a"}], "temperature": 1.0, **body}
        fields |= {"max_tokens": 120, "logit_bias": self.biases, "n": 3}
        return self.live.post("/v1/chat/completions", **fields)


def started(family: Family) -> Iterator[Live]:
    """Start a server. Its template opens the reasoning if `enable_thinking` is set."""
    turn, think = family.format.turn, family.format.markers["think"]
    template = (
        f"{{% for m in messages %}}{turn}user\n{{{{ m.content }}}}{family.end}{{% endfor %}}"
        f"{turn}model\n{{% if enable_thinking %}}{think}\n{{% endif %}}"
    )
    backend = family.tokenizer.backend
    tokenizer = Tokenizer(backend, chat_template=template)
    size, end = backend.get_vocab_size(), backend.token_to_id(family.end)
    config = Gemma4Config(
        vocab_size=size,
        hidden_size=16,
        layer_types=("sliding", "full"),
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        full_num_kv_heads=1,
        full_head_dim=8,
        intermediate_size=16,
        sliding_window=8,
        max_positions=512,
    )
    model_def = ModelDef(Gemma4, config, "float32")
    generation = GenerationDefaults(eos_token_ids=(end,))
    target = fakes.loaded(model_def, tiny.random_params(model_def, 0), generation)
    program_features = ProgramFeatures(num_biases=4, grammars=True)
    drafter = fakes.dflash(target, block_size=3)
    engine = Engine(
        target, drafter, program_features=program_features, batch_size=3, cache_length=LENGTH
    )
    serving_model = ServingModel(
        names=("thinking",),
        tokenizer=tokenizer,
        spec=engine.spec,
        generation=generation,
        cache_length=LENGTH,
        settings=Settings(max_n=8),
        grammars=GrammarTokens(tokenizer, size, [end]),
    )
    yield from run_server(serving_model, engine, no_scores)


@pytest.fixture(
    scope="module",
    params=[GEMMA, QWEN],
    ids=lambda family: family.format.name,
)
def thinking(request: pytest.FixtureRequest) -> Iterator[Thinking]:
    family = request.param
    bias = 1.5 * math.log(family.tokenizer.backend.get_vocab_size())
    ends = [family.encode(text)[0] for text in (family.format.markers["end think"], "}", '"', ":")]
    for live in started(family):
        live.client.timeout = httpx.Timeout(120)  # its first request compiles
        yield Thinking(family, live, {str(i): bias for i in ends})


def streamed(reply: Any) -> dict[int, dict[str, str]]:
    """Return the reasoning, content and arguments of each choice."""
    texts: dict[int, dict[str, str]] = {}
    for line in reply.text.splitlines():
        for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
            of = texts.setdefault(
                choice["index"], {"reasoning": "", "content": "", "arguments": ""}
            )
            delta = choice["delta"]
            for name in ("reasoning", "content"):
                of[name] += delta.get(name) or ""
            for call in delta.get("tool_calls") or ():
                of["arguments"] += call["function"].get("arguments") or ""
    return texts


def whole(choice: dict[str, Any]) -> dict[str, str]:
    message = choice["message"]
    calls = message.get("tool_calls") or ()
    return {
        "reasoning": message.get("reasoning") or "",
        "content": message.get("content") or "",
        "arguments": "".join(call["function"]["arguments"] for call in calls),
    }


ASKED = [
    ({"response_format": FORM}, "content"),
    ({"structured_outputs": {"json": SCHEMA}}, "content"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "arguments",
    ),
]


@pytest.mark.parametrize(("asked", "part"), ASKED, ids=["format", "structured", "tool"])
@pytest.mark.parametrize("opened", [True, False], ids=["opened", "free"])
def test_the_grammar_begins_behind_the_reasoning(
    thinking: Thinking, asked: dict[str, Any], part: str, opened: bool
) -> None:
    kwargs = {"chat_template_kwargs": {"enable_thinking": opened}}
    ended, thought = 0, 0
    for seed in range(2):
        body = {**asked, **kwargs, "seed": seed}
        reply = thinking.post(**body).json()
        streams = streamed(thinking.post(**body, stream=True))
        for choice in reply["choices"]:
            parts = whole(choice)
            assert streams[choice["index"]] == parts
            thought += bool(parts["reasoning"])
            if choice["finish_reason"] != "length":
                ended += 1
                jsonschema.validate(json.loads(parts[part]), SCHEMA)
                assert not parts["content"].strip() or part == "content"
    assert ended >= 3
    assert thought >= (4 if opened else 0)


def test_a_strict_tool_that_may_be_called(thinking: Thinking) -> None:
    """The reply may be text. If it calls, the arguments fit."""
    call = thinking.family.encode(thinking.family.format.markers["call"])[0]
    biases = {str(call): 9.0}
    changed = dataclasses.replace(thinking, biases=biases)
    reply = changed.post(tools=[TOOL], seed=1).json()
    calls = [
        json.loads(call["function"]["arguments"])
        for choice in reply["choices"]
        for call in choice["message"].get("tool_calls") or ()
    ]
    assert calls
    for arguments in calls:
        jsonschema.validate(arguments, SCHEMA)
