"""Clients get the same streams with speculation on and off, greedy, in float32.

A real engine decodes. Its target writes what a test wrote down, the corpus of
`tests.text.chat.models`: a bias of each request says which text. Its drafter knows the texts, but
for some tokens, so that steps commit groups of all sizes.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import pytest

from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Completion, Request
from jaxspec.models.gemma4 import Gemma4
from jaxspec.options import ProgramFeatures, Sampling
from jaxspec.serving.parse_request import ParsedRequest
from jaxspec.serving.reply_format import ChatChoice, TextChoice
from jaxspec.shapes import Array
from jaxspec.text.chat import ToolChoice
from jaxspec.tokenizer import stop_at_text
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.model_def import ModelDef
from tests import fakes, tiny
from tests.text.chat.models import GEMMA, QWEN, Family, corpus

FAMILIES = (GEMMA, QWEN)
NAMES, TEXTS = [
    [*(x)] for x in zip(*((n, (f, t)) for f in FAMILIES for n, t in corpus(f).items()), strict=True)
]
REPLIES = [family.encode(text) for family, text in TEXTS]
LONGEST = max(map(len, REPLIES))
VOCAB_SIZE = max(f.tokenizer.backend.get_vocab_size() for f in FAMILIES)
PROMPT = 2  # tokens
SPACING = 100.0
"""Between the biases of two texts. The target's own logits are from -30 to 30."""


def write_down(logits: Array, positions: Array) -> Array:
    """Leave only the next token of the text that the first logit's bias names."""
    script = jnp.asarray([reply + [0] * (LONGEST - len(reply)) for reply in REPLIES])
    text = jnp.round(logits[..., 0] / SPACING).astype(jnp.int32)
    token = script[text, jnp.clip(positions - PROMPT, 0, LONGEST - 1)]
    return jnp.where(jnp.arange(logits.shape[-1]) == token[..., None], 0.0, -jnp.inf)


@dataclass(frozen=True)
class Case:
    """A text, and how it ends: by its own end, by a stop text, or by a limit."""

    text: int
    stops: tuple[str, ...] = ()
    limit: int | None = None

    @property
    def family(self) -> Family:
        return TEXTS[self.text][0]

    @property
    def request(self) -> Request:
        tokenizer = self.family.tokenizer
        end = tokenizer.backend.token_to_id(self.family.end)
        assert end is not None
        return Request(
            (self.text, 0),
            self.limit or len(REPLIES[self.text]) + 3,
            Sampling(logit_bias={0: SPACING * self.text}),
            stop_ids=(end,),
            stop_at=stop_at_text(tokenizer, self.stops) if self.stops else None,
        )


SHORT = [text for text, reply in enumerate(REPLIES) if len(reply) < 120]
CASES = [
    *(Case(text) for text in range(len(TEXTS))),
    *(Case(text, limit=max(1, len(REPLIES[text]) // 2)) for text in SHORT),
    # Inside a thought, an answer, a name or a string, and where only a part of it is written.
    *(Case(text, ("see", "😀", "fi")) for text in SHORT),
    *(Case(text, ("\n", "zz")) for text in SHORT),
]


@pytest.fixture(scope="module")
def models() -> tuple[LoadedModel, LoadedModel]:
    config = dataclasses.replace(
        tiny.config("31b"), vocab_size=VOCAB_SIZE, layer_types=("sliding", "full")
    )
    model_def = ModelDef(Gemma4, config, "float32")
    target = fakes.loaded(model_def, tiny.random_params(model_def, 0))
    rng = random.Random(0)
    known = [
        [text, 0, *(i if rng.random() < 0.8 else 3 for i in reply), 0, 0, 0]
        for text, reply in enumerate(REPLIES)
    ]
    return target, fakes.lookup(target, known, block_size=5)


def replies(case: Case, events: list[Any]) -> tuple[list[dict[str, Any]], str, list[str | None]]:
    """Return a chat's deltas, a completion's text, and both finish reasons."""
    prompt = (3, 3)
    parsed = ParsedRequest((prompt,), (), 1, case.stops, None, tools=ToolChoice(calls=True))
    tokenizer = case.family.tokenizer
    chat, text = ChatChoice(tokenizer, parsed, 0), TextChoice(tokenizer, parsed, 0)
    deltas = [chat.push(event) for event in events]
    texts = [text.push(event) for event in events]
    reply = "".join(delta.fields.get("text", "") for delta in texts)
    reasons = [deltas[-1].finish_reason, texts[-1].finish_reason]
    return _joined([delta.fields for delta in deltas]), reply, reasons


def _joined(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return deltas in their order, with neighbours of a kind joined and without ids of calls."""
    made: list[dict[str, Any]] = []
    for delta in deltas:
        for kind in ("reasoning", "content"):
            if piece := delta.get(kind):
                made.append({kind: piece})
        for call in delta.get("tool_calls", ()):
            made.append({"call": call["index"], **call["function"]})
    return made


def by_kind(parts: list[dict[str, Any]]) -> dict[Any, Any]:
    """Return the whole text, the whole reasoning, and each call's name and arguments."""
    whole: dict[Any, Any] = {}
    for part in parts:
        if "call" in part:
            name, arguments = whole.get(part["call"], ("", ""))
            whole[part["call"]] = name + part.get("name", ""), arguments + part["arguments"]
        else:
            ((kind, text),) = part.items()
            whole[kind] = whole.get(kind, "") + text
    return whole


def run(engine: Engine) -> list[list[Any]]:
    """Return the events of each case."""
    seen: list[list[Any]] = [[] for _ in CASES]
    for event in engine.run([case.request for case in CASES]):
        seen[event.id].append(event)  # type: ignore[index]
    return seen


@pytest.mark.slow  # 12 s
def test_clients_cannot_tell_whether_tokens_were_drafted(
    models: tuple[LoadedModel, LoadedModel],
) -> None:
    target, drafter = models
    shared: dict[str, Any] = dict(
        program_features=ProgramFeatures(num_biases=1, logits_fn=write_down),
        batch_size=32,
        cache_length=512,
        choose_length="never",
    )
    plain = run(Engine(target, None, steps_per_return=16, **shared))
    drafted = run(Engine(target, drafter, steps_per_return=1, **shared))
    kept = [len(e[-1].token_ids) for e in plain]
    assert kept[: len(TEXTS)] == [*map(len, REPLIES)], "the target writes something else"
    lengths = [length for events in drafted for length in events[-1].acceptance_lengths]
    assert {1, 2, 3, 5} <= set(lengths)
    reasons = set()
    for case, one, other in zip(CASES, plain, drafted, strict=True):
        about = NAMES[case.text], case
        assert one[-1].token_ids == other[-1].token_ids, about
        assert isinstance(one[-1], Completion)
        (parts, text, why), (parts_, text_, why_) = replies(case, one), replies(case, other)
        assert by_kind(parts) == by_kind(parts_), about
        assert (text, why) == (text_, why_), about
        reasons.update(why)
    assert reasons == {"stop", "length", "tool_calls"}
