"""Measure what `jaxspec.Sampler` saves and what it costs, on the default device.

    python -m scripts.measure_sampler [--repeats 5] [--json out/sampler.json]

**Fork**: samples of one prompt of 1,024 tokens (the bundled pair, its held-out prompts joined). `fork` reads
the prompt once and repeats its state; `fresh` reads it once for each sample, all in one batch. With one new
token it is the prefill that counts. Both have the same seeds and must give the same tokens.

**Overhead**: a call of a sampler whose target has some 700 arrays, and so little to compute that the call
counts. `call` is the sampler's, with its checks; `program` the same program jitted by itself, for arguments
that are on the device; `arguments` a program that takes the same arguments and does next to nothing. What a
call costs beyond the device's time is at most call - program + arguments.

Calls of a kind take turns, so that a busy machine slows all alike; compiling is left out. Beside the clock
stands the processor time of the calling thread, which other programs do not add to: on a busy machine that is
the one to read for the overhead, which is all work of that thread.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

import jaxspec
from jaxspec.api import BUNDLED
from jaxspec.configs.gemma4 import Gemma4Config
from jaxspec.models.gemma4 import Gemma4
from jaxspec.weights.model_def import ModelDef

MANY_LAYERS = Gemma4Config(
    vocab_size=64,
    hidden_size=16,
    layer_types=("sliding",) * 63 + ("full",),
    num_heads=1,
    num_kv_heads=1,
    head_dim=16,
    full_num_kv_heads=1,
    full_head_dim=16,
    intermediate_size=16,
    sliding_window=16,
    max_positions=64,
)


# Of each call [turns, 2]: by the clock, and of the processor for the calling thread.
Seconds = dict[str, np.ndarray]


def times(calls: Mapping[str, Callable[[], Any]], repeats: int) -> Seconds:
    """Return what each call takes in each of so many turns, after one that is not counted."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            begin = time.perf_counter(), time.thread_time()
            jax.block_until_ready(call())
            if turn:
                ends = time.perf_counter(), time.thread_time()
                seconds[name].append((ends[0] - begin[0], ends[1] - begin[1]))
    return {name: np.asarray(values) for name, values in seconds.items()}


def summary(seconds: np.ndarray) -> dict[str, float]:
    """Return what says something on a machine that others use too: the least, and the thread's own time."""
    (least, thread_least), (median, thread_median) = np.min(seconds, 0), np.median(seconds, 0)
    return {
        "least_s": float(least),
        "median_s": float(median),
        "thread_least_s": float(thread_least),
        "thread_median_s": float(thread_median),
    }


def measure_fork(new_tokens: int, samples: int, repeats: int) -> dict[str, Any]:
    """Time samples of one prefill against as many prefills."""
    target, drafter = jaxspec.load()
    held_out = json.loads((BUNDLED / "held_out.json").read_text())["prompts"]
    prompt = [token for p in held_out for token in p["ids"]][:1024]

    def caller(num_samples: int) -> Callable[[], jaxspec.GenerateResult]:
        sampler = jaxspec.Sampler(
            target, drafter, max_new_tokens=new_tokens, num_samples=num_samples, stop_ids=()
        )
        prompts = jnp.asarray([prompt] * (samples // num_samples))
        sampling, seeds = sampler.sampling(samples, temperature=1.0), np.arange(samples)
        assert drafter is not None
        weights = target.params, drafter.params
        return lambda: sampler(*weights, prompts, sampling, seeds)

    calls = {"fork": caller(samples), "fresh": caller(1)}
    fork, fresh = (np.asarray(call().tokens) for call in calls.values())
    seconds = times(calls, repeats)
    return {
        "prompt_tokens": len(prompt),
        "new_tokens": new_tokens,
        "samples": samples,
        "equal_samples": int(np.sum((fork == fresh).all(axis=1))),
        **{name: summary(values) for name, values in seconds.items()},
        "speedup": float(np.median(seconds["fresh"][:, 0] / seconds["fork"][:, 0])),
    }


def measure_overhead(repeats: int) -> dict[str, Any]:
    """Time a call of a sampler with many arrays, and what the device and JAX would take without it."""
    model_def = ModelDef(Gemma4, MANY_LAYERS, "float32")
    params = model_def.random_params(0)
    sampler = jaxspec.Sampler(model_def, None, max_new_tokens=1)
    prompts = jaxspec.Prompts(jnp.ones((1, 1), jnp.int32), jnp.ones(1, jnp.int32))
    given = prompts, sampler.sampling(1), jnp.zeros(1, jnp.uint32)
    program = jax.jit(lambda params, *given: sampler(params, None, *given))
    arguments = jax.jit(lambda params, *given: params["final_norm"][0] + given[-1][0])
    seconds = times(
        {
            "call": lambda: sampler(params, None, *given),
            "program": lambda: program(params, *given),
            "arguments": lambda: arguments(params, *given),
        },
        repeats,
    )
    found = {name: summary(values) for name, values in seconds.items()}
    overhead = {
        key: found["call"][key] - found["program"][key] + found["arguments"][key]
        for key in found["call"]
    }
    return {"arrays": len(params), "repeats": repeats, **found, "overhead": overhead}


def main(
    repeats: Annotated[int, typer.Option(min=1, help="of each fork; overhead: 20 times these")] = 5,
    samples: Annotated[int, typer.Option(min=1)] = 16,
    json_path: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
) -> None:
    """Measure and print a table."""
    device = jax.devices()[0]
    found = {
        "device": device.device_kind,
        "cpu_cores": os.cpu_count(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "fork": [measure_fork(new_tokens, samples, repeats) for new_tokens in (1, 32)],
        "overhead": measure_overhead(20 * repeats),
    }
    table = Table(
        "",
        "least ms",
        "median ms",
        "thread's least",
        "median",
        title=f"jaxspec.Sampler on {found['device']}",
    )
    for fork in found["fork"]:
        for name in ("fork", "fresh"):
            label = f"{name}: {samples} samples of {fork['new_tokens']} tokens"
            _add(table, label, fork[name])
        equal = f"  {fork['equal_samples']} of {samples} samples equal"
        table.add_row(equal, "", f"{fork['speedup']:.1f}x")
    overhead = found["overhead"]
    for name in ("call", "program", "arguments"):
        _add(table, f"{name}: {overhead['arrays']} arrays", overhead[name])
    _add(table, "  call - program + arguments", overhead["overhead"])
    Console().print(table)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(found, indent=1) + "\n")


def _add(table: Table, label: str, seconds: dict[str, float]) -> None:
    table.add_row(label, *(f"{value * 1e3:.2f}" for value in seconds.values()))


if __name__ == "__main__":
    typer.run(main)
