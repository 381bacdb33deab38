"""Keep an engine on a mesh under load, and see that it neither hangs nor fails.

    python -m tests.tools.soak --mesh data=2,model=2 --calls 2000
    JAX_NUM_CPU_DEVICES=4 python -m tests.tools.soak --mesh data=2,model=2 --calls 2000   (without GPUs)

Requests of the bundled pair come at random, with short and long prompts, some with a common beginning that is stored.
Some are drawn, and some are cancelled. Slots are in pages that hold fewer rows. Every 20 calls the caller runs a
program with a sum over all devices between two steps. A call that takes longer than `--limit-s` prints the stacks of
all threads and ends the process.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import random
import time
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxspec
from jaxspec import Completion, Engine, Request, Sampling
from jaxspec.mesh import MESH_AXES
from jaxspec.weights.sharding import parse_mesh

SLOTS, CACHE_LENGTH, COMMON = 16, 576, 300


def soak(mesh: Mesh, calls: int, seed: int = 0, limit_s: float = 300.0) -> dict[str, Any]:
    """Make so many calls of an engine and let its requests end. Return what it did.

    Raises:
      RuntimeError: a request ended with an error, or the caller's program gave a wrong sum.
    """
    target, drafter = jaxspec.load(mesh=mesh)
    engine = Engine(
        target,
        drafter,
        batch_size=SLOTS,
        cache_length=CACHE_LENGTH,
        cache_tokens=mesh.shape["data"] * 2 * CACHE_LENGTH,
        prefix_bytes=2**25,
        read_ahead=4,
        steps_per_return=4,
    )
    rng, live = random.Random(seed), set[Hashable]()
    vocab = range(5, target.config.vocab_size)
    common = rng.choices(vocab, k=COMMON)
    ones = np.ones(mesh.devices.shape, np.float32)
    placed = jax.device_put(ones, NamedSharding(mesh, PartitionSpec(*MESH_AXES)))
    add_up = jax.jit(lambda x: x.sum())
    number = done = cancelled = tokens = 0
    begin = time.perf_counter()
    while number < calls or not engine.is_idle:
        while number < calls and len(live) < 2 * SLOTS and rng.random() < 0.7:
            own = rng.choices(vocab, k=rng.choice([5, 20, 70, 130]))
            prompt = common + own if rng.random() < 0.4 else own
            sampling = Sampling(temperature=rng.choice([0.0, 0.8]))
            id = engine.add(Request(tuple(prompt), rng.randint(4, 80), sampling, seed=number))
            live.add(id)
        faulthandler.dump_traceback_later(limit_s, exit=True)
        for event in engine.step():
            if isinstance(event, Completion):
                if event.error is not None:
                    raise RuntimeError(f"request {event.id} failed: {event.error}")
                live.discard(event.id)
                done += 1
                tokens += len(event.token_ids)
        if live and rng.random() < 0.02:
            engine.cancel(rng.choice(sorted(live, key=str)))
            cancelled += 1
        if number % 20 == 0 and float(add_up(placed)) != ones.size:
            raise RuntimeError("the caller's own sum is wrong")
        number += 1
    faulthandler.cancel_dump_traceback_later()
    stats = engine.prefix_stats
    return {
        "mesh": dict(mesh.shape),
        "device": jax.devices()[0].device_kind,
        "calls": number,
        "done": done,
        "cancelled": cancelled,
        "tokens": tokens,
        "preemptions": engine.timings.preemptions,
        "prefix_hits": stats.hits if stats else 0,
        "seconds": round(time.perf_counter() - begin, 1),
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Keep an engine on a mesh under load.")
    parser.add_argument("--mesh", default="data=1,model=1")
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=300.0)
    args = parser.parse_args()
    print(json.dumps(soak(parse_mesh(args.mesh), args.calls, args.seed, args.limit_s)))


if __name__ == "__main__":
    main()
