"""Logprobs of emitted tokens are those of a teacher-forced pass over the finished text."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.engine.engine import Completion, Request
from jaxspec.options import Sampling, Tree
from jaxspec.sampling import SamplingParams, shape_logits, suppress
from tests import fakes
from tests.cases import NEW_TOKENS, PROMPT_LENGTHS, Case, case, run, slow

FILTERS: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": dict(temperature=1.3),
    "cold": dict(temperature=0.05),
    "filters": dict(temperature=0.8, top_k=20, top_p=0.9),
}
DRAFTS: dict[str, dict[str, Any]] = {
    "none": {},
    "mixed": {},
    "mtp": dict(num_draft_tokens=4),
    "tree": dict(num_draft_tokens=9, tree=Tree(3, 4)),
}


def teacher_forced(c: Case, request: Request, done: Completion) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-probabilities of the new tokens: under the target, and under what was sampled from."""
    begin, count = len(request.prompt_ids), len(done.token_ids)
    text = np.zeros((1, max(PROMPT_LENGTHS) + NEW_TOKENS), np.int32)
    text[0, : begin + count] = request.prompt_ids + done.token_ids
    logits = fakes.forward(c.target.model_def, c.target.params, jnp.asarray(text))
    logits = jnp.asarray(np.asarray(logits)[:, begin - 1 : begin - 1 + count])
    new = np.asarray(done.token_ids)[:, None]
    plain = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits))[0], new, axis=-1)[:, 0]
    if request.sampling.temperature == 0:
        return plain, np.zeros_like(plain)
    sampling = SamplingParams.make(
        1,
        temperature=request.sampling.temperature,
        top_k=request.sampling.top_k,
        top_p=request.sampling.top_p,
    )
    assert c.target.generation is not None
    logits = suppress(logits, c.target.generation.suppress_tokens)
    shaped = np.asarray(jax.nn.log_softmax(jax.jit(shape_logits)(logits, sampling)))
    return plain, np.take_along_axis(shaped[0], new, axis=-1)[:, 0]


@pytest.mark.parametrize("drafts", ["mtp", *slow("none", "tree", "mixed")])
def test_logprobs_equal_a_teacher_forced_pass(drafts: str) -> None:
    """All filters in one batch; the target of this feature set suppresses tokens that would else win."""
    c = case("12b")
    name = {"none": None, "tree": "mixed"}.get(drafts, drafts)
    engine = c.engine(name, cache_length=80, logprobs=True, **DRAFTS[drafts])
    asked = [
        Request(p, NEW_TOKENS, Sampling(**f), seed=4)
        for p, f in zip(c.prompts[:4], FILTERS.values(), strict=True)
    ]
    for request, done in zip(asked, run(engine, asked), strict=True):
        assert done.logprobs is not None
        assert done.sampled_logprobs is not None
        assert len(done.logprobs) == len(done.token_ids) == NEW_TOKENS
        plain, sampled = teacher_forced(c, request, done)
        # Two ways to compute the logits differ by rounding, in proportion to numbers of up to 30, whose last
        # place is 1.9e-6; a small temperature enlarges that. Processors and releases of XLA round in their own
        # order: most stay below 1e-5. Met were 1.2e-5 (AMD EPYC with AVX-512), and 3.5e-5 of 8.3 (jax 0.12).
        tolerance = 2e-5 * max(
            1.0, 1 / request.sampling.temperature if request.sampling.temperature else 1.0
        )
        np.testing.assert_allclose(done.logprobs, plain, atol=2e-5, rtol=3e-6)
        np.testing.assert_allclose(done.sampled_logprobs, sampled, atol=tolerance, rtol=3e-6)


def test_stops_and_limits_cut_logprobs_too() -> None:
    c = case("12b")
    tokens = c.continuation(1)
    engine = c.engine("mixed", cache_length=80, logprobs=True)
    asked = [Request(c.prompts[1], NEW_TOKENS, stop_ids=(tokens[6],)), Request(c.prompts[2], 1)]
    for request, done in zip(asked, run(engine, asked), strict=True):
        assert done.logprobs is not None
        assert len(done.logprobs) == len(done.token_ids)
        np.testing.assert_allclose(done.logprobs, teacher_forced(c, request, done)[0], atol=1e-4)
