"""What decoding says, as JSON: `test_x64` compares what it says with and without `jax_enable_x64`."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np

from jaxspec.api import Pair
from jaxspec.models.gemma4 import Gemma4
from jaxspec.options import ProgramFeatures, Sampling
from jaxspec.rollout.sampler import Sampler
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.model_def import ModelDef
from tests import fakes, tiny

PROMPTS = [[2, 17, 80, 33, 5], [2, 99]]
SAMPLING = Sampling(temperature=1.0, top_k=50, top_p=0.9)


def pair() -> Pair:
    config = dataclasses.replace(tiny.config("31b"), layer_types=("sliding", "full"))
    model_def = ModelDef(Gemma4, config, "float32")
    target: LoadedModel = fakes.loaded(model_def, tiny.random_params(model_def, 0))
    return Pair(target, fakes.dflash(target, block_size=4))


def said() -> dict[str, Any]:
    """Return the tokens and log-probabilities of a sampler, and the tokens of `generate`: of an engine."""
    models = pair()
    weights = [model.params for model in models]
    ask = Sampler(models, max_new_tokens=5, program_features=ProgramFeatures(logprobs=True))
    result = ask(*weights, PROMPTS, SAMPLING, np.arange(2), stop_ids=[[1]] * 2)
    assert result.logprobs is not None
    generated = models.plain().generate(
        PROMPTS, max_new_tokens=5, sampling=SAMPLING, batch_size=2, cache_length=64
    )
    return {
        "sampler": result.tokens.tolist(),
        "logprobs": result.logprobs.sampled.tolist(),
        "dtypes": [str(x.dtype) for x in (result.tokens, result.finish_reasons, result.num_steps)],
        "generate": [list(g.token_ids) for g in generated],
    }


if __name__ == "__main__":
    print(json.dumps(said()))
