"""Which requests are refused, and by which field. Nothing is decoded here."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from jaxspec.engine.request import Request, check_for_spec, kind_refusal
from jaxspec.options import FieldError, Sampling
from jaxspec.runtime.runtime import make_spec
from jaxspec.weights.define import model_def_of
from tests.tiny_qwen3 import config

SPEC = make_spec(model_def_of(config("qwen3-tied"), "float32"), None)  # 160 tokens


def _refusal(**changes: Any) -> FieldError | None:
    """Refuse a request with such fields: the annotations, which only tests enforce, would refuse some before."""
    request = Request((2, 3), 4)
    for name, value in changes.items():
        object.__setattr__(request, name, value)
    return check_for_spec(SPEC, request)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prompt_ids", (), "the prompt is empty"),
        ("prompt_ids", (2, 5.0), r"prompt ids \[5\.0\] are not whole numbers"),
        ("prompt_ids", (2, 5.5), "are not whole numbers"),
        ("prompt_ids", (2, True), r"\[True\] are not whole numbers"),
        ("prompt_ids", (2, "3"), r"\['3'\] are not whole numbers"),
        ("prompt_ids", np.asarray([2.0, 3.0]), "are not whole numbers"),
        ("prompt_ids", (2, 160), r"\[160\] are outside the vocabulary; expected 0 to 159"),
        ("prompt_ids", (2, 2**32 + 3), r"\[4294967299\] are outside the vocabulary"),
        ("prompt_ids", (2, -1), r"\[-1\] are outside the vocabulary"),
        ("stop_ids", (2**40,), r"stop ids \[1099511627776\] are outside the vocabulary"),
        ("stop_ids", (1.0,), r"stop ids \[1\.0\] are not whole numbers"),
        ("seed", -1, "seed is -1; it must be from 0 to 4,294,967,295"),
        ("seed", 2**32, "seed is 4294967296; it must be from 0 to 4,294,967,295"),
        ("seed", 1.5, r"seed is 1\.5; it must be a whole number"),
        ("seed", True, "seed is True; it must be a whole number"),
        ("sample", 2**32, "sample is 4294967296; it must be from 0 to 4,294,967,295"),
        ("max_new_tokens", 0, "max_new_tokens is 0; it must be 1 or more"),
        ("max_new_tokens", 4.0, r"max_new_tokens is 4\.0; it must be a whole number"),
    ],
)
def test_what_cannot_be_meant_is_refused_and_not_cut(field: str, value: Any, message: str):
    """Seeds were reduced modulo 2**32, and float ids cut to whole ones: other draws, other text."""
    error = _refusal(**{field: value})
    assert error is not None
    assert error.field == field
    with pytest.raises(FieldError, match=message):
        raise error


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prompt_ids", None, "is None; it must be token ids"),
        ("prompt_ids", "text", "is 'text'; it must be token ids"),
        ("sampling", None, "is None; it must be a Sampling"),
        ("sampling", {"top_k": 1}, "it must be a Sampling"),
        ("stop_ids", 5, r"is 5; it must be token ids, or \(\)"),
        ("id", ([],), r"is \(\[\],\); it must be hashable"),
        ("stop_at", 3, "is 3; it must be a function, or None"),
        ("grammar", "(ab)+", "it must be what GrammarTokens.compile returns"),
    ],
)
def test_fields_of_another_kind_are_refused_by_name(field: str, value: Any, message: str):
    said = kind_refusal(field, value)
    assert said is not None
    assert re.search(message, said)
    request = Request((2, 3), 4)
    assert kind_refusal(field, getattr(request, field)) is None
    # The annotations, which only tests enforce, would refuse it before.
    object.__setattr__(request, field, value)
    with pytest.raises(FieldError, match=message):
        request.__post_init__()


def test_whole_numbers_of_every_kind_are_taken():
    assert _refusal() is None
    assert _refusal(seed=2**32 - 1, sample=2**32 - 1) is None
    assert (
        _refusal(prompt_ids=np.asarray([2, 3]), stop_ids=(np.int32(5),), seed=np.int64(7)) is None
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(top_k=2.5), r"top_k is 2\.5; it must be a whole number, 0 or more"),
        (dict(top_k=True), "top_k is True; it must be a whole number"),
        (dict(temperature="1"), "temperature is '1'; it must be a number, from 0 to 1e6"),
        (dict(temperature=10**400), "temperature is 1000.*; it must be a number"),
        (dict(top_p=float("nan")), r"top_p is nan; it must be in \(0, 1\]"),
        (dict(logit_bias={5.0: 1.0}), r"logit_bias has the id 5\.0; expected whole numbers"),
        (dict(logit_bias={True: 1.0}), "logit_bias has the id True; expected whole numbers"),
    ],
)
def test_sampling_reads_no_number_into_anything_else(values: dict[str, Any], message: str):
    sampling = Sampling()
    for name, value in values.items():
        object.__setattr__(sampling, name, value)
    with pytest.raises(FieldError, match=message):
        sampling.__post_init__()
