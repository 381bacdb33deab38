"""Compute how much of the slots' memory a mixed trace uses. Needs no weights and no GPU.

    python -m scripts.measure_slots

Requests of the trace that `jaxspec bench --trace generated` sends go through slots of one length. All steps take
equally long, and a slot that is free gets the next request at once. The table is of the steps in which all slots
are taken:

    a slot    MiB
    slots     GiB of all of them
    used      share of it that holds keys and values of tokens that are there
    two       GiB, if requests of up to 1,024 positions had slots of as many
    pages     GiB, if each row had just its tokens, in pages of 128
    unused    share of a GPU's memory that slots have and tokens do not
    most      slots that fit beside weights and the logits of a step
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxspec.commands.bench import trace
from jaxspec.options import Drafting
from jaxspec.registry import presets
from jaxspec.runtime import memory
from jaxspec.runtime.runtime import cache_bucket, make_spec
from jaxspec.state import DecodeSpec
from jaxspec.weights.define import model_def_of, random_drafter, with_kv_dtype
from jaxspec.weights.sharding import make_mesh

GIB, MIB = 2**30, 2**20
GPU_BYTES = 139 * GIB  # of an H200
SHARE = 0.9  # of it that JAX is given
SHORT, PAGE, SEED = 1024, 128, 7
CASES: Sequence[tuple[str, str, int, float, int, int, str | None]] = (
    ("26b-a4b", "dflash", 15, 7.7, 32, 192, None),
    ("26b-a4b", "mtp", 7, 4, 128, 384, None),
    ("26b-a4b", "mtp", 7, 4, 256, 512, None),
    ("26b-a4b", "dflash", 15, 7.7, 256, 512, None),
    ("26b-a4b", "dflash", 15, 7.7, 256, 512, "fp8"),
    ("31b", "dflash", 15, 7.7, 16, 192, None),
    ("31b", "dflash", 15, 7.7, 32, 192, None),
    ("12b", "dflash", 15, 7.7, 32, 192, None),
    ("e4b", "mtp", 5, 3.5, 128, 384, None),
    ("e2b", "mtp", 5, 3.5, 128, 384, None),
)
"""Target, drafter, drafts, tokens a step, slots, requests, dtype of keys and values."""


def spec_of(preset: str, kind: str, drafts: int, kv_dtype: str | None) -> DecodeSpec:
    """Return what such a pair does, in bfloat16."""
    target = with_kv_dtype(model_def_of(presets()[preset], "bfloat16"), kv_dtype)
    return make_spec(target, random_drafter(preset, kind, "bfloat16")[0], Drafting(drafts))


def rows_over_time(
    jobs: Sequence[trace.TraceRequest], slots: int, tokens_a_step: float
) -> list[np.ndarray]:
    """Return, for each step with all slots taken, [slots, 2]: tokens that are there, and in the end."""
    waiting, moments = list(jobs[::-1]), []
    rows = np.zeros((slots, 2))
    while True:
        for slot in np.flatnonzero(rows[:, 0] >= rows[:, 1]):
            if not waiting:
                return moments
            job = waiting.pop()
            rows[slot] = job.prompt_tokens + 1, job.prompt_tokens + job.new_tokens
        moments.append(rows.copy())
        rows[:, 0] += tokens_a_step


def main() -> None:
    """Print the table."""
    mesh = make_mesh(devices=jax.devices()[:1])
    table = Table(box=None)
    for heading in ("", "slots", "a slot", "slots", "used", "two", "pages", "unused", "most"):
        table.add_column(heading, justify="right", no_wrap=True)
    for preset, kind, drafts, tau, slots, requests, kv_dtype in CASES:
        spec = spec_of(preset, kind, drafts, kv_dtype)
        jobs = trace.generate(requests, SEED, None, spec.target.config.max_positions)
        longest = max(job.prompt_tokens + job.new_tokens for job in jobs)
        length, step = cache_bucket(longest + spec.step_tokens), spec.step_tokens
        lengths = np.arange(64, length + 1, 64)
        # A cache of n positions takes what n tokens take: shorter ones have no ring.
        sizes = [memory.footprint(spec, 1, int(n), mesh).caches for n in lengths]
        moments = rows_over_time(jobs, slots, tau)

        def mean(positions: np.ndarray, lengths=lengths, sizes=sizes) -> float:
            return float(np.interp(positions, lengths, sizes).sum(axis=1).mean())

        there = np.array([np.minimum(rows[:, 0], rows[:, 1]) for rows in moments])
        ends = np.array([rows[:, 1] for rows in moments]) + step
        whole, used = slots * sizes[-1], mean(there)
        fixed = memory.footprint(spec, slots, length, mesh)
        free = SHARE * GPU_BYTES - fixed.weights
        most = free / (sizes[-1] + fixed.logits / slots)
        table.add_row(
            f"{preset}, {kind} {drafts}{'' if kv_dtype is None else ', ' + kv_dtype}",
            f"{slots} x {length:,}",
            f"{sizes[-1] / MIB:,.0f}",
            f"{whole / GIB:.1f}",
            f"{used / whole:.0%}",
            f"{mean(np.where(ends > SHORT, length, SHORT)) / GIB:.1f}",
            f"{mean(-(-(there + step) // PAGE) * PAGE) / GIB:.1f}",
            f"{(whole - used) / GPU_BYTES:.0%}",
            f"{most:,.0f}",
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
