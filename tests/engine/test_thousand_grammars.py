"""A thousand random schemas on the bundled pair, drafter on: all outputs are valid, and those of plain decoding."""

from __future__ import annotations

import json
import random
import time

import jsonschema
import pytest

pytest.importorskip("llguidance")

import jaxspec
from jaxspec import constraint
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Completion, Request
from jaxspec.options import ProgramFeatures, Sampling
from tests.text.grammars.test_grammars import schema

COUNT, SAMPLED, NEW = 1000, 500, 128


@pytest.mark.slow
def test_a_thousand_schemas(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Half of them greedy, half sampled. A reply that came to its limit may be cut anywhere, and begins validly."""
    pair = jaxspec.load()
    texts = json.loads((jaxspec.api.BUNDLED / "held_out.json").read_text())["prompts"]
    rng, requests, schemas = random.Random(15), [], []
    for i in range(COUNT):
        wanted = schema(rng)
        schemas.append(wanted)
        ids = rng.choice(texts)["ids"][: rng.randrange(4, 60)]
        requests.append(
            Request(
                tuple(ids),
                NEW,
                Sampling(temperature=0.0 if i >= SAMPLED else 1.0),
                seed=i,
                grammar=pair.grammar_tokens.compile("json_schema", wanted),
            )
        )
    seconds, count, answer = [0.0], [0], constraint.answer

    def timed(numbers, *given, **options):  # type: ignore[no-untyped-def]
        begin = time.perf_counter()
        out = answer(numbers, *given, **options)
        seconds[0] += time.perf_counter() - begin
        count[0] += int((numbers >= 0).sum()) * out[1].shape[1]
        return out

    monkeypatch.setattr(constraint, "answer", timed)

    def run(drafter: object, some: list[Request]) -> list[Completion]:
        made = Engine(
            pair.target,
            drafter,  # type: ignore[arg-type]
            program_features=ProgramFeatures(grammars=True),
            batch_size=32,
            cache_length=256,
            read_ahead=8,
            choose_length="never",
        )
        done = {e.id: e for e in made.run(some) if isinstance(e, Completion)}
        return [done[i] for i in range(len(some))]

    done = run(pair.drafter, requests)
    mask_us = 1e6 * seconds[0] / count[0]
    cut = 0
    for wanted, request, completion in zip(schemas, requests, done, strict=True):
        assert completion.error is None, wanted
        if completion.finish_reason == "length":
            cut += 1
            assert request.grammar is not None
            request.grammar.matcher().commit(completion.token_ids)  # a valid beginning
            continue
        jsonschema.validate(json.loads(pair.decode(completion.token_ids)), wanted)
    plain = run(None, requests[SAMPLED:])
    assert [c.token_ids for c in plain] == [c.token_ids for c in done[SAMPLED:]]
    lengths = [n for c in done for n in c.acceptance_lengths]
    with capsys.disabled():
        print(
            f"\n{COUNT} schemas, {len({json.dumps(s) for s in schemas})} different: {COUNT - cut} valid, {cut} cut "
            f"by length; {sum(lengths) / len(lengths):.2f} tokens a step; {mask_us:.1f} µs a mask; "
            f"{len(plain)} greedy ones equal plain decoding"
        )
