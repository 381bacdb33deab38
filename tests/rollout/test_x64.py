"""Decoding under `jax_enable_x64`, which trainers of other models set: the same numbers in the same dtypes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import jax
import pytest

from jaxspec.options import Drafting, ProgramFeatures, Sampling, Tree
from jaxspec.rollout.batch import Prompts
from jaxspec.rollout.sampler import Sampler
from tests import fakes
from tests.cases import target
from tests.tools import x64


@pytest.mark.slow  # two processes that compile the same; the next one sees most of it
def test_the_same_is_said() -> None:
    """Carries of loops once had 64 bits before a step and 32 after it, and nothing ran."""
    environment = os.environ | {"JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.tools.x64"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        expected = x64.said()
        out, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors[-4000:]
    assert json.loads(out.splitlines()[-1]) == expected
    assert expected["dtypes"] == ["int32"] * 3


def wide(jaxpr: Any) -> set[str]:
    """Return which operations of a program make numbers of 64 bits."""
    found = set()
    for equation in jaxpr.eqns:
        kinds = {str(getattr(out.aval, "dtype", "")) for out in equation.outvars}
        if kinds & {"int64", "uint64", "float64"}:
            found.add(str(equation.primitive))
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                found |= wide(getattr(inner, "jaxpr", inner))
    return found


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns")


@pytest.mark.parametrize(
    ("name", "drafter", "drafting", "slots"),
    [
        ("e2b", "mtp", Drafting(7, tree=Tree(3, 3)), 2),
        pytest.param(
            "26b-a4b",
            "dflash",
            Drafting(draft_sampling=True, verification="block"),
            None,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_no_number_has_64_bits(
    name: str, drafter: str, drafting: Drafting, slots: int | None
) -> None:
    """In any form of speculation, in turns too: such a number would also make every GPU slower."""
    model = target(name)
    draft = fakes.dflash(model, block_size=5)
    if drafter == "mtp":
        draft = fakes.mtp(model, centroids=name == "e2b")
    program_features = ProgramFeatures(logprobs=True, penalties=True, num_biases=2, top_logprobs=3)
    ask = Sampler(
        model,
        draft,
        max_new_tokens=4,
        num_samples=2,
        batch_size=slots,
        drafting=drafting,
        program_features=program_features,
    )
    prompts = Prompts.padded([[2] * 5, [3] * 600])
    sampling = Sampling(temperature=1.0, top_k=5, top_p=0.9)
    with jax.enable_x64(True):
        program = jax.make_jaxpr(lambda *weights: ask(*weights, prompts, sampling, range(4)))
        assert wide(program(model.params, draft.params).jaxpr) == set()
        assert wide(jax.make_jaxpr(lambda x: x + 1)(1).jaxpr) == {"add"}  # it would be seen
