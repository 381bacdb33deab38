"""Load a pair and generate: the few lines that most programs need.

    target, drafter = jaxspec.load()                      # the bundled pair
    for done in jaxspec.generate(target, drafter, ["def main():"], max_new_tokens=64):
        print(done.token_ids, done.acceptance_lengths)

For streaming, refilled slots or changing weights use `engine.Engine`; inside a jitted program of your
own, the functions of `decode`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from jaxspec.drafters.base import Tree
from jaxspec.engine import Completion, Engine, Request
from jaxspec.loading import CheckpointError, LoadedModel, load_drafter, load_target
from jaxspec.tokenizer import Tokenizer

BUNDLED = Path(__file__).parent / "bundled"
BUNDLED_DRAFTERS = ("dflash", "mtp")
MOST_SLOTS = 8  # of a batch, unless asked for


def load(
    target: str | None = None,
    drafter: str | None = None,
    *,
    dtype: str | None = None,
    revision: str | None = None,
    drafter_revision: str | None = None,
    token: str | None = None,
    offline: bool = False,
    mesh: Mesh | None = None,
) -> tuple[LoadedModel, LoadedModel | None]:
    """Load a target and a drafter onto the default device, or a mesh.

    Args:
      target: a directory (ours or Hugging Face's) or a hub id; None for the bundled one.
      drafter: likewise, or "dflash" or "mtp" for the bundled ones, or "none". None means the bundled
        DFlash drafter for the bundled target, and no drafter for any other.
      dtype: "float32" or "bfloat16"; None for bfloat16 on GPUs and float32 elsewhere.
      revision: of the target's hub id; `drafter_revision` is the drafter's.
      token: for the hub; None for the one huggingface_hub knows.
      offline: use the hub cache and no network.
      mesh: devices to split both over, from `sharding.make_mesh`; decoding then runs there.

    Raises:
      CheckpointError, ConfigError: something is missing or wrong with one of them.
    """
    source = drafter or ("none" if target else "dflash")
    known = (*BUNDLED_DRAFTERS, "none")
    if source not in known and "/" not in source and not Path(source).exists():
        raise CheckpointError(
            f"drafter {source} is not known; expected a directory, a hub id (owner/name), or one of "
            f"{', '.join(known)}"
        )
    hub: dict[str, Any] = dict(
        dtype=dtype or default_dtype(), token=token, offline=offline, mesh=mesh
    )
    loaded_drafter = None
    if source != "none":  # first, being the quicker one to be wrong
        path = str(BUNDLED / source) if source in BUNDLED_DRAFTERS else source
        loaded_drafter = load_drafter(path, revision=drafter_revision, **hub)
    return load_target(target or str(BUNDLED / "target"), revision=revision, **hub), loaded_drafter


def default_dtype() -> str:
    """Return the dtype that suits the default device."""
    return "bfloat16" if jax.default_backend() == "gpu" else "float32"


def generate(
    target: LoadedModel,
    drafter: LoadedModel | None,
    prompts: Sequence[str | Sequence[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    seed: int = 0,
    num_samples: int = 1,
    ignore_eos: bool = False,
    batch_size: int | None = None,
    cache_length: int | None = None,
    num_draft_tokens: int | None = None,
    tree: Tree | None = None,
    draft_sampling: bool = False,
    verification: Literal["standard", "block"] = "standard",
    logprobs: bool = False,
    top_logprobs: int = 0,
) -> list[Completion]:
    """Continue prompts, given as text or token ids, and return completions in their order.

    Args:
      temperature, top_k, top_p, min_p: 0 is greedy; then what filters, see `engine.Request`.
      repetition_penalty, presence_penalty, frequency_penalty, logit_bias: likewise, in greedy rows too.
      seed: with a completion's place in the list it names that completion's random draws.
      num_samples: completions of each prompt, one after the other; each reads the prompt for itself
        (`Sampler` reads it once for all).
      ignore_eos: go on past the checkpoint's end-of-sequence ids.
      batch_size: prompts decoded together; None for all, up to 8.
      cache_length: positions of each; None for as many as the longest needs. With both given, what follows a
        prompt at its place in the list does not depend on the others, to the last bit.
      num_draft_tokens: drafted a step; None for the drafter's own number.
      tree: draft a tree of that many tokens instead of a chain.
      draft_sampling, verification: see `state.DecodeSpec`.
      logprobs: keep the log-probability of every token, see `engine.Completion`; `top_logprobs` of so
        many of the target's best tokens too.

    Raises:
      ValueError: a prompt or an option cannot be used; nothing was generated.
    """
    tokenizer = None
    if any(isinstance(p, str) for p in prompts):
        tokenizer = Tokenizer.load(target.directory)
    eos = () if ignore_eos or target.generation is None else target.generation.eos_token_ids
    requests = [
        Request(
            tuple(tokenizer.encode(p)) if tokenizer and isinstance(p, str) else tuple(map(int, p)),
            max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=logit_bias or {},
            stop_ids=eos,
            seed=seed,
        )
        for p in prompts
    ]
    if num_samples < 1:
        raise ValueError(f"num_samples is {num_samples}; it must be 1 or more")
    requests = [r for r in requests for _ in range(num_samples)]
    engine = Engine.fitting(
        target,
        drafter,
        requests,
        cache_length=cache_length,
        batch_size=batch_size or min(len(requests), MOST_SLOTS) or 1,
        num_draft_tokens=num_draft_tokens,
        tree=tree,
        draft_sampling=draft_sampling,
        verification=verification,
        logprobs=logprobs or top_logprobs > 0,
        top_logprobs=top_logprobs,
    )
    each = enumerate(requests[::num_samples])
    wrong = [f"prompt {i}: {error}" for i, r in each if (error := engine.check(r))]
    if wrong:
        raise ValueError("\n".join(wrong))
    done = [event for event in engine.run(requests) if isinstance(event, Completion)]
    return sorted(done, key=lambda completion: completion.index)
