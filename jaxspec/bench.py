"""`jaxspec bench`: what a decode step must cost, and then what it does cost.

Read `bench_command`, then `step_cost` (arithmetic over configs, no device) and `measure` (the decode
programs, timed). A batch of prompts is prefilled and decoded until every row has its new tokens; nothing
refills a row. Plain decoding is the same loop without a drafter, measured in the same run.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib.metadata
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jax.sharding import Mesh
from rich import box
from rich.console import Console
from rich.table import Table

import jaxspec
from jaxspec import decode
from jaxspec.api import BUNDLED, default_dtype, load
from jaxspec.batching import PREFILL_CHUNK, row_keys
from jaxspec.cache import RING_MULTIPLE
from jaxspec.config import (
    DFLASH_PRESETS,
    MTP_PRESETS,
    TARGET_PRESETS,
    DFlashConfig,
    MTPConfig,
    TargetConfig,
    default_feature_layers,
)
from jaxspec.decode import Admission, DecodeSpec, DecodeState, PrefillChunk, propose
from jaxspec.drafters.base import Tree
from jaxspec.drafters.dflash import DFlashDrafter
from jaxspec.drafters.mtp import MTPDrafter
from jaxspec.drafters.tree import ancestors, check_tree
from jaxspec.models.gemma4 import Gemma4, Placement, run_layer
from jaxspec.params import Graph
from jaxspec.report import json_lines, write_line
from jaxspec.sampling import SamplingParams
from jaxspec.shapes import Int, Params
from jaxspec.sharding import fetch, mesh_of, parse_mesh, place_rows

DRAFTER_KINDS = ("mtp", "dflash")
WARM_UP_STEPS = 4  # the first run of a captured graph goes kernel by kernel, the second records it


class Preset(enum.StrEnum):
    e2b = "e2b"
    e4b = "e4b"
    b12 = "12b"
    a4b = "26b-a4b"
    b31 = "31b"


class Dtype(enum.StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


def bench_command(
    random_weights: Annotated[
        Preset | None,
        typer.Option(
            metavar="e2b|e4b|12b|26b-a4b|31b",
            help="Random weights of this target's shape, and of its drafter's.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|ID", help="A Gemma 4 model. Default: the bundled one, with its drafter."
        ),
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|ID|mtp|dflash|none",
            help="A drafter; [bold]mtp[/] or [bold]dflash[/] for the bundled one, or the one of that kind that "
            "belongs to --random-weights (default: dflash); [bold]none[/] to measure plain decoding alone.",
        ),
    ] = None,
    synthetic_acceptance: Annotated[
        float | None,
        typer.Option(
            metavar="TAU",
            help="Commit this many tokens a step on average, whatever the target thinks of the drafts. "
            "Only the decision is replaced: all work is done. The text is meaningless.",
        ),
    ] = None,
    batch_size: Annotated[
        list[int] | None, typer.Option(min=1, help="Rows. Repeatable. Default: 1, 8 and 32.")
    ] = None,
    prompt_length: Annotated[
        int, typer.Option(min=1, help="Tokens of each prompt; at most 64 with the bundled target.")
    ] = 256,
    new_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens to decode in each row, after prefill's own.")
    ] = 256,
    num_draft_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens drafted a step. Default: the drafter's own number."),
    ] = None,
    tree_topk: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Draft a tree: each level widens its best nodes, this many, by as many tokens. Needs "
            "--tree-depth and --num-draft-tokens, the nodes to verify: 3, 5 and 11, say.",
        ),
    ] = None,
    tree_depth: Annotated[int | None, typer.Option(min=1, help="Levels of that tree.")] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="Of weights and caches. Default: bfloat16 on GPU, float32 on CPU.",
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="data=2,model=4",
            help="Split rows over so many devices, and models over so many. Default: one device.",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each case.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Of random weights and prompts.")] = 0,
    json_path: Annotated[
        str | None,
        typer.Option(
            "--json",
            metavar="PATH|-",
            help="Also write everything as one line of JSON; with - the rest goes to standard error.",
        ),
    ] = None,
) -> None:
    """Measure prefill and decode steps, beside the least they could take.

    Every case is compiled and warmed up first; neither is in any time. Each
    time is the median of the repeats, with the device waited for, and every
    repeat starts again from empty caches.

      jaxspec bench

      jaxspec bench --random-weights 26b-a4b --synthetic-acceptance 7.7 --batch-size 1 --batch-size 8

      jaxspec bench --random-weights e4b --drafter mtp --num-draft-tokens 5 --synthetic-acceptance 3.5
    """
    console = Console(stderr=json_path == "-", highlight=False)
    try:
        given = [v is not None for v in (tree_topk, tree_depth, num_draft_tokens)]
        if any(given[:2]) and not all(given):
            raise ValueError(
                "a tree needs --tree-topk, --tree-depth and --num-draft-tokens together"
            )
        devices = None if mesh is None else parse_mesh(mesh)
        sizes = batch_size or [1, 8, 32]
        if devices is not None:
            check_rows(sizes, devices.shape["data"])
        with json_lines(json_path or "-") as file:
            pair = make_pair(
                None if random_weights is None else random_weights.value,
                target,
                drafter,
                dtype=dtype.value if dtype else default_dtype(),
                num_draft_tokens=num_draft_tokens,
                tree=Tree(tree_topk, tree_depth) if tree_topk and tree_depth else None,
                synthetic_acceptance=synthetic_acceptance,
                seed=seed,
                mesh=devices,
            )
            prompts = pair.prompts(max(sizes), prompt_length, seed)
            report = run(console, pair, prompts, sizes, new_tokens, repeats, seed)
            if json_path is not None:
                write_line(file, report)
    except (ValueError, OSError) as error:
        message = f"error: {error}"
        Console(stderr=True).print(
            message, style="red", markup=False, highlight=False, soft_wrap=True
        )
        raise typer.Exit(2) from None


# --- what is measured --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """Two models to measure, or one; with words for the report."""

    spec: DecodeSpec
    target_params: Params
    drafter_params: Params | None
    target_name: str
    drafter_name: str | None
    held_out: tuple[tuple[int, ...], ...] = ()  # prompts the bundled pair was not trained on

    @functools.cached_property
    def mesh(self) -> Mesh:
        return mesh_of(target=self.target_params, drafter=self.drafter_params)

    def prompts(self, count: int, length: int, seed: int) -> np.ndarray:
        """Return [count, length] prompt ids: held-out ones where there are any, else random."""
        if self.held_out:
            length = min(length, min(map(len, self.held_out)))
            rows = [self.held_out[i % len(self.held_out)][:length] for i in range(count)]
            return np.asarray(rows, np.int32)
        rng = np.random.default_rng(seed)
        return rng.integers(
            self.spec.target.config.vocab_size, size=(count, length), dtype=np.int32
        )


def make_pair(
    preset: str | None,
    target: str | None,
    drafter: str | None,
    *,
    dtype: str,
    num_draft_tokens: int | None = None,
    tree: Tree | None = None,
    synthetic_acceptance: float | None = None,
    seed: int = 0,
    mesh: Mesh | None = None,
) -> Pair:
    """Load a pair or make a random one.

    Raises:
      ValueError: the options do not fit each other, or a model cannot be loaded.
    """
    if preset is not None and (target is not None or drafter not in (None, *DRAFTER_KINDS, "none")):
        raise ValueError(
            "--random-weights makes both models itself: give no --target, and as --drafter only "
            f"{', '.join(DRAFTER_KINDS)} or none"
        )
    if synthetic_acceptance is not None and tree is not None:
        raise ValueError(
            "--synthetic-acceptance is for chains; leave --tree-topk and --tree-depth out"
        )
    held_out: tuple[tuple[int, ...], ...] = ()
    drafter_graph, drafter_params, drafter_name, suppressed = None, None, None, ()
    if preset is not None:
        target_graph = Graph(Gemma4, TARGET_PRESETS[preset], dtype)
        target_params, target_name = (
            _random_params(target_graph, seed, mesh),
            f"{preset}, random weights",
        )
        if drafter != "none":
            drafter_graph, drafter_name = random_drafter(preset, drafter or "dflash", dtype)
            drafter_params = _random_params(drafter_graph, seed + 1, mesh)
    else:
        model, drafter_model = load(target, drafter, dtype=dtype, mesh=mesh)
        target_graph, target_params, target_name = model.graph, model.params, target or "bundled"
        suppressed = model.generation.suppress_tokens if model.generation else ()
        if target is None:
            values = json.loads((BUNDLED / "held_out.json").read_text())
            held_out = tuple(tuple(p["ids"]) for p in values["prompts"])
        if drafter_model is not None:
            drafter_model.config.check_fits(target_graph.config)
            drafter_graph, drafter_params = drafter_model.graph, drafter_model.params
            drafter_name = drafter or "dflash"
    spec = DecodeSpec(
        target=target_graph,
        drafter=drafter_graph,
        num_draft_tokens=_draft_tokens(drafter_graph, num_draft_tokens, tree),
        tree=tree,
        suppress_tokens=suppressed,
        synthetic_acceptance=synthetic_acceptance,
    )
    if synthetic_acceptance is not None and not 1 <= synthetic_acceptance <= spec.step_tokens:
        raise ValueError(
            f"--synthetic-acceptance is {synthetic_acceptance}; with {spec.num_draft_tokens} draft tokens "
            f"it lies between 1 and {spec.step_tokens}"
        )
    return Pair(spec, target_params, drafter_params, target_name, drafter_name, held_out)


def _draft_tokens(drafter: Graph | None, asked: int | None, tree: Tree | None) -> int:
    if drafter is None:
        if asked is not None:
            raise ValueError("--num-draft-tokens needs a drafter")
        return 0
    model = drafter.bind_abstract()
    if tree is not None:
        check_tree(tree, asked or 0, model.max_draft_tokens)
    elif asked is not None and asked > model.max_draft_tokens:
        raise ValueError(
            f"--num-draft-tokens is {asked}; this drafter proposes 1 to {model.max_draft_tokens} a step"
        )
    return asked or model.default_draft_tokens


def random_drafter(preset: str, kind: str, dtype: str) -> tuple[Graph, str]:
    """Return the drafter of a kind for a target preset, and what to call it."""
    if kind == "mtp":
        return Graph(MTPDrafter, MTP_PRESETS[preset], dtype), f"MTP of {preset}, random weights"
    config, name = drafter_config(preset)
    return Graph(DFlashDrafter, config, dtype), name


def check_rows(batch_sizes: Sequence[int], data: int) -> None:
    """Refuse batches that leave the devices of the data axis with unequal rows, with ValueError."""
    wrong = [size for size in batch_sizes if size % data]
    if wrong:
        raise ValueError(
            f"--batch-size {wrong[0]} does not divide by data={data} of --mesh; give multiples of {data}"
        )


def _random_params(graph: Graph, seed: int, mesh: Mesh | None) -> Params:
    """Return random weights; an order of tokens is a random one, so that a step gathers what a real one does."""
    params = graph.random_params(seed, None if mesh is None else graph.shardings(mesh))
    if "token_ordering" in params:
        ordering = params["token_ordering"]
        shuffled = np.random.default_rng(seed).permutation(ordering.size)
        params["token_ordering"] = jax.device_put(
            shuffled.astype(ordering.dtype), ordering.sharding
        )
    return params


def drafter_kind(spec: DecodeSpec) -> str | None:
    """Return "mtp", "dflash", or None without a drafter."""
    return spec.drafter and ("mtp" if isinstance(spec.drafter.config, MTPConfig) else "dflash")


def drafter_config(preset: str) -> tuple[DFlashConfig, str]:
    """Return the DFlash drafter for a target preset and what to call it.

    There is no released drafter for E2B and E4B. Theirs is made by the proportions of the others.
    """
    if preset in DFLASH_PRESETS:
        return DFLASH_PRESETS[preset], f"DFlash as for {preset}, random weights"
    target = TARGET_PRESETS[preset]
    heads = max(8, 8 * round(1.5 * target.hidden_size / 128 / 8))
    config = dataclasses.replace(
        DFLASH_PRESETS["26b-a4b"],
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_heads=heads,
        intermediate_size=2 * target.hidden_size,
        feature_layers=default_feature_layers(target.num_layers, 6),
        num_target_layers=target.num_layers,
        max_positions=target.max_positions,
    )
    rule = (
        f"DFlash made up for {preset} (26b-a4b's, with the target's width, {heads} heads for 1.5 x width, "
        "MLP 2 x width, six even feature layers), random weights"
    )
    return config, rule


# --- what it must cost -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ceiling:
    """What this device can do, measured: memory traffic of a copy, arithmetic of a big product."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class StepCost:
    """The least one decode step of a whole batch moves and computes.

    Each of its passes (target, every pass of the drafter, absorb) reads each weight that it uses once, and each key and value
    that some query sees once. Of tables that are looked up, the rows; of experts, as many as uniform
    routing would reach.
    """

    weight_bytes: float
    kv_bytes: float
    flops: float

    def __add__(self, other: StepCost) -> StepCost:
        return StepCost(
            self.weight_bytes + other.weight_bytes,
            self.kv_bytes + other.kv_bytes,
            self.flops + other.flops,
        )

    def floor_s(self, ceiling: Ceiling) -> float:
        """Return the seconds below which nothing of this cost can go."""
        memory = (self.weight_bytes + self.kv_bytes) / ceiling.bytes_per_s
        return max(memory, self.flops / ceiling.flops_per_s)


def step_costs(spec: DecodeSpec, batch: int, context: int) -> tuple[StepCost, StepCost]:
    """Return the costs of verifying and of drafting in one step (nothing, without a drafter).

    Each waits for what the other made, so a step takes at least the sum of their floors.

    Args:
      context: committed tokens of each row.
    """
    verify = target_cost(spec.target, batch, spec.step_tokens, context)
    if spec.drafter is None:
        return verify, StepCost(0, 0, 0)
    cost = mtp_cost if isinstance(spec.drafter.config, MTPConfig) else dflash_cost
    return verify, cost(spec, batch, context)


def step_cost(spec: DecodeSpec, batch: int, context: int) -> StepCost:
    """Return all that one step moves and computes."""
    verify, draft = step_costs(spec, batch, context)
    return verify + draft


def step_floor_s(spec: DecodeSpec, batch: int, context: int, ceiling: Ceiling) -> float:
    """Return the seconds below which no step can go."""
    return sum(cost.floor_s(ceiling) for cost in step_costs(spec, batch, context))


def target_cost(graph: Graph, batch: int, tokens: int, context: int) -> StepCost:
    """Return the cost of one target pass over `tokens` tokens a row, with logits for all of them."""
    config: TargetConfig = graph.config
    rows = batch * tokens
    weight_bytes = flops = 0.0
    for name, a in graph.abstract_params().items():
        nbytes, products = a.size * a.dtype.itemsize, 2.0 * a.size * rows
        if name == "per_layer.table":
            nbytes, products = nbytes * rows / a.shape[0], 0.0
        elif ".experts." in name and a.ndim > 2:
            nbytes *= expected_experts(config, rows) / config.num_experts
            products *= config.num_experts_per_token / config.num_experts
        weight_bytes += nbytes
        flops += products if a.ndim > 1 else 0.0
    kv_bytes = 0.0
    for i, kind in enumerate(config.layer_types):
        seen = (
            min(context + tokens, config.sliding_window) if kind == "sliding" else context + tokens
        )
        head_dim = config.head_dim_of(i)
        kv_bytes += 2.0 * batch * seen * config.num_kv_heads_of(i) * head_dim * _itemsize(graph)
        flops += 4.0 * rows * seen * config.num_heads * head_dim
    return StepCost(weight_bytes, kv_bytes, flops)


def dflash_cost(spec: DecodeSpec, batch: int, context: int) -> StepCost:
    """Return the cost of drafting a block and of absorbing what the target made of it."""
    assert spec.drafter is not None
    config: DFlashConfig = spec.drafter.config
    block = spec.depth + 1  # of a tree, too: its levels share the distributions of one block
    rows = batch * block
    weight_bytes = flops = kv_bytes = 0.0
    for name, a in spec.drafter.abstract_params().items():
        # Keys and values are made twice: of the block that is drafted, of the context that is kept.
        uses = 2 if name.endswith(".kv") else 1
        weight_bytes += uses * a.size * a.dtype.itemsize
        flops += uses * 2.0 * a.size * rows if a.ndim > 1 else 0.0
    head = config.vocab_size * config.hidden_size
    weight_bytes += head * _itemsize(spec.target)
    flops += 2.0 * head * batch * spec.depth
    for kind in config.layer_types:
        seen = context if kind == "full" else min(context, config.sliding_window or context)
        kv_bytes += (
            2.0 * batch * seen * config.num_kv_heads * config.head_dim * _itemsize(spec.target)
        )
        flops += 4.0 * rows * (seen + block) * config.num_heads * config.head_dim
    return StepCost(weight_bytes, kv_bytes, flops)


def mtp_cost(spec: DecodeSpec, batch: int, context: int) -> StepCost:
    """Return the cost of drafting with an assistant, one pass a draft or a level of a tree.

    A pass waits for the token of the pass before it, so each reads everything again (no cache is assumed to
    hold a gigabyte from one pass to the next):

        passes x (weights + head + embedding rows + K/V of the target's last sliding and last full layer)

    A pass has one row a sequence in a chain, `topk` rows in a tree (one in its first level). The head is the
    whole table, or with centroids the rows of the clusters that uniform choices of all rows reach, and their
    places in the order of tokens. The layers of a type share their keys and values, which count once a pass.
    """
    assert spec.drafter is not None
    config: MTPConfig = spec.drafter.config
    params = spec.drafter.abstract_params()
    levels = [1] * spec.depth
    if spec.tree is not None:
        levels[1:] = [spec.tree.topk] * (spec.depth - 1)
    itemsize = _itemsize(spec.target)
    weight_bytes = flops = kv_bytes = 0.0
    for level in levels:
        rows = batch * level
        for name, a in params.items():
            share = used = 1.0  # of the table: read by all rows together, used by each
            if config.num_centroids and name in ("head", "token_ordering"):
                used = config.num_top_centroids / config.num_centroids
                share = _reached(used, rows)
            weight_bytes += share * a.size * a.dtype.itemsize
            flops += 2.0 * used * a.size * rows if a.ndim > 1 else 0.0
        weight_bytes += rows * config.backbone_hidden_size * itemsize
        for kind in set(config.layer_types):
            sliding = kind == "sliding"
            seen = min(context, config.num_window_keys) if sliding else context
            heads = config.num_kv_heads if sliding else config.full_num_kv_heads
            head_dim = config.head_dim if sliding else config.full_head_dim
            kv_bytes += 2.0 * batch * seen * heads * head_dim * itemsize
            layers = config.layer_types.count(kind)
            flops += 4.0 * rows * seen * layers * config.num_heads * head_dim
    return StepCost(weight_bytes, kv_bytes, flops)


def expected_experts(config: TargetConfig, rows: int) -> float:
    """Return how many experts of a layer uniform routing of `rows` tokens reaches on average."""
    share = config.num_experts_per_token / config.num_experts
    return config.num_experts * _reached(share, rows)


def _reached(share: float, rows: int) -> float:
    """Return the share of a set that `rows` uniform choices of a share each reach together on average."""
    return 1 - (1 - share) ** rows


def _itemsize(graph: Graph) -> int:
    return jnp.dtype(graph.dtype).itemsize


def measure_ceiling(dtype: str, nbytes: float) -> Ceiling:
    """Measure the device's copy bandwidth (bytes read + bytes written) and its rate in a square product.

    Args:
      nbytes: what a step reads; as much is copied (up to 2 GiB), so that a model which fits a cache is
        held against that cache.
    """
    size = int(min(max(nbytes, 1 << 20), 1 << 31)) // 4
    buffer = [jax.random.normal(jax.random.key(0), (size,), jnp.float32)]
    negate = jax.jit(jnp.negative, donate_argnums=0)  # in place: no time goes into new memory

    def copy() -> jax.Array:
        buffer[0] = negate(buffer[0])
        return buffer[0]

    copy_s = _median_seconds(copy)
    n = 1024 if jax.default_backend() == "cpu" else 8192
    a = jax.random.normal(jax.random.key(1), (n, n), jnp.dtype(dtype))
    precision = jax.lax.Precision.HIGHEST if dtype == "float32" else None
    product = jax.jit(functools.partial(jnp.matmul, precision=precision))
    return Ceiling(8 * size / copy_s, 2 * n**3 / _median_seconds(lambda: product(a, a)))


def _median_seconds(call: Callable[[], Any], repeats: int = 5, chain: int = 16) -> float:
    jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(chain):  # so that starting a call hides behind the one before
            last = call()
        jax.block_until_ready(last)
        seconds.append((time.perf_counter() - begin) / chain)
    return statistics.median(seconds)


# --- what it does cost -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """Median of some repeats, with the range they lie in."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float], scale: float = 1.0) -> Spread:
        return cls(statistics.median(values) * scale, min(values) * scale, max(values) * scale)

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.min:.3g}-{self.max:.3g})"


@dataclass(frozen=True)
class Result:
    """One case: a batch size, with or without the drafter.

    Attributes:
      label: the case in a few words, such as "mtp 7": drafter and draft tokens.
      draft_floor_ms: the drafter's part of `floor_ms`.
      steps: of the longest row; `step_ms` is the decode time of the batch over these.
      tokens_per_s: tokens returned after prefill's, of all rows, over decode time.
      acceptance_length: mean over all verify steps of all rows; None for plain decoding.
      distinct_experts: a layer, in one target pass at the end of the run: mean, fewest and most.
      peak_bytes: of the process so far, where the device counts them.
    """

    mode: str
    label: str
    batch_size: int
    step_tokens: int
    cache_length: int
    cost: StepCost
    floor_ms: float
    draft_floor_ms: float
    step_ms: Spread
    steps: int
    tokens_per_s: Spread
    ttft_ms: Spread
    achieved_bytes_per_s: float
    acceptance_length: float | None
    acceptance: str | None  # "real" or "synthetic"
    distinct_experts: Spread | None
    prefill_compile_s: float
    decode_compile_s: float
    peak_bytes: int | None


def measure(
    pair: Pair, prompts: np.ndarray, ceiling: Ceiling, *, new_tokens: int, repeats: int, seed: int
) -> Result:
    """Prefill and decode one batch of prompts, `repeats` times after a warm-up.

    Args:
      ceiling: of one device; floors and rates are of the devices that share the same rows.
    """
    mesh = pair.mesh
    spec, (batch, prompt_length) = pair.spec, prompts.shape
    needed = prompt_length + new_tokens + 1 + spec.step_tokens
    cache_length = -(-needed // RING_MULTIPLE) * RING_MULTIPLE
    weights = (pair.target_params, pair.drafter_params)
    admission = place_rows(_admission(batch, new_tokens + 1, seed), mesh)
    chunks = [place_rows(chunk, mesh) for chunk in _chunks(prompts)]

    def fresh() -> DecodeState:
        return jax.block_until_ready(admit(empty(), admission))

    empty = functools.partial(
        decode.init_state,
        spec,
        batch,
        cache_length=cache_length,
        num_stop_ids=1,
        cache_dtype=jnp.dtype(spec.target.dtype),
        mesh=mesh,
    )
    state = empty()
    admit = _compiled(decode.admit, mesh, 0, state, admission)
    state = admit(state, admission)
    begin = time.perf_counter()
    prefill = functools.partial(decode.prefill, spec)
    prefills = {c.tokens.shape: _compiled(prefill, mesh, 2, *weights, state, c) for c in chunks}
    prefill_compile_s = time.perf_counter() - begin
    begin = time.perf_counter()
    loop = functools.partial(decode.decode_loop, spec)
    loop = _compiled(loop, mesh, 2, *weights, state, place_rows(np.int32(0), mesh))
    decode_compile_s = time.perf_counter() - begin

    def once(state: DecodeState, max_steps: int) -> tuple[DecodeState, float, float]:
        steps = jax.block_until_ready(place_rows(np.int32(max_steps), mesh))
        begin = time.perf_counter()
        for chunk in chunks:
            state = prefills[chunk.tokens.shape](*weights, state, chunk)
        jax.block_until_ready(state)
        middle = time.perf_counter()
        state = jax.block_until_ready(loop(*weights, state, steps))
        return state, middle - begin, time.perf_counter() - middle

    once(state, WARM_UP_STEPS)
    ttft_s, step_s, tokens_per_s, lengths, steps = [], [], [], [], 0
    for _ in range(repeats):
        state, prefill_s, decode_s = once(fresh(), new_tokens)
        num_steps, num_tokens = fetch((state.num_steps, state.num_tokens))
        steps = int(num_steps.max())
        ttft_s.append(prefill_s)
        step_s.append(decode_s / steps)
        tokens_per_s.append(float((num_tokens - 1).sum()) / decode_s)
        accepted = fetch(state.acceptance_lengths)
        lengths.append(np.concatenate([accepted[i, :n] for i, n in enumerate(num_steps)]).mean())
    # The floor is that of the middle of the run.
    context = prompt_length + new_tokens // 2
    rows, ceiling = _of_a_group(mesh, batch, ceiling)
    cost, draft = step_cost(spec, rows, context), step_costs(spec, rows, context)[1]
    speculative = spec.drafter is not None
    experts = None
    if spec.target.config.num_experts:
        with jax.set_mesh(mesh):
            counts = fetch(jax.jit(distinct_experts, static_argnums=0)(spec, *weights, state))
        experts = Spread(float(counts.mean()), float(counts.min()), float(counts.max()))
    return Result(
        mode="speculative" if speculative else "plain",
        label=_label(spec),
        batch_size=batch,
        step_tokens=spec.step_tokens,
        cache_length=cache_length,
        cost=cost,
        floor_ms=step_floor_s(spec, rows, context, ceiling) * 1e3,
        draft_floor_ms=draft.floor_s(ceiling) * 1e3,
        step_ms=Spread.of(step_s, 1e3),
        steps=steps,
        tokens_per_s=Spread.of(tokens_per_s),
        ttft_ms=Spread.of(ttft_s, 1e3),
        achieved_bytes_per_s=(cost.weight_bytes + cost.kv_bytes) / statistics.median(step_s),
        acceptance_length=float(np.mean(lengths)) if speculative else None,
        acceptance=("real" if spec.synthetic_acceptance is None else "synthetic")
        if speculative
        else None,
        distinct_experts=experts,
        prefill_compile_s=prefill_compile_s,
        decode_compile_s=decode_compile_s,
        peak_bytes=(jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
    )


def _of_a_group(mesh: Mesh, batch: int, ceiling: Ceiling) -> tuple[int, Ceiling]:
    """Return the rows that devices of the model axis share, and what these devices can do together."""
    model = mesh.shape["model"]
    together = Ceiling(ceiling.bytes_per_s * model, ceiling.flops_per_s * model)
    return batch // mesh.shape["data"], together


def _compiled(function: Any, mesh: Mesh, state: int, *args: Any) -> Any:
    """Compile a decode program, which takes the state at that place, may use its memory and returns the next."""
    jitted = jax.jit(
        function,
        donate_argnums=state,
        out_shardings=jax.tree.map(lambda x: x.sharding, args[state]),
        compiler_options=decode.COMPILER_OPTIONS,
    )
    with jax.set_mesh(mesh):
        return jitted.lower(*args).compile()


def _admission(batch: int, max_new_tokens: int, seed: int) -> Admission:
    """Admit a greedy request without stop ids to every slot."""
    zeros = jnp.zeros(batch, jnp.int32)
    seeds = np.stack([np.full(batch, seed), np.arange(batch)], axis=1).astype(np.uint32)
    return Admission(
        slots=jnp.arange(batch, dtype=jnp.int32),
        max_new_tokens=zeros + max_new_tokens,
        stop_ids=jnp.full((batch, 1), -1, jnp.int32),
        sampling=SamplingParams.make(batch),
        keys=row_keys(jnp.asarray(seeds)),
    )


def _chunks(prompts: np.ndarray) -> list[PrefillChunk]:
    batch, length = prompts.shape
    chunks = []
    for begin in range(0, length, PREFILL_CHUNK):
        tokens = prompts[:, begin : begin + PREFILL_CHUNK]
        end = begin + tokens.shape[1]
        chunks.append(
            PrefillChunk(
                slots=jnp.arange(batch, dtype=jnp.int32),
                tokens=jnp.asarray(tokens),
                start=jnp.full(batch, begin, jnp.int32),
                count=jnp.full(batch, end - begin, jnp.int32),
                is_last=jnp.full(batch, end == length),
            )
        )
    return chunks


def distinct_experts(
    spec: DecodeSpec, target_params: Params, drafter_params: Params | None, state: DecodeState
) -> Int[jax.Array, " L"]:
    """Count the experts of each layer that the next target pass of all rows would use."""
    target: Gemma4 = spec.target.bind(target_params)
    tokens, sees = state.anchors[:, None], None
    if spec.drafter is not None:
        draft = propose(target, spec.drafter.bind(drafter_params or {}), spec, state)
        tokens = jnp.concatenate([tokens, draft.tokens], axis=1)
        sees = None if draft.parents is None else ancestors(draft.parents)
    x = target.embedder.encode(tokens)
    offset = jnp.arange(tokens.shape[1])[None, :] if sees is None else jnp.sum(sees, axis=-1) - 1
    count = jnp.full_like(state.lengths, tokens.shape[1])
    where = Placement(state.lengths[:, None] + offset, state.lengths, count, ancestors=sees)
    counts = []
    for layer, cache in zip(target.layers, state.caches, strict=True):
        residual = layer.attention_block(x, where, cache, None)[0]
        chosen, _ = layer.experts.route(residual)
        used = jnp.zeros(spec.target.config.num_experts, jnp.int32).at[chosen].set(1)
        counts.append(jnp.sum(used))
        x = run_layer(layer, x, where, cache, None, None)[0]
    return jnp.stack(counts)


# --- the report --------------------------------------------------------------------------------------


def run(
    console: Console,
    pair: Pair,
    prompts: np.ndarray,
    batch_sizes: Sequence[int],
    new_tokens: int,
    repeats: int,
    seed: int,
) -> dict[str, Any]:
    """Print the ceiling, measure every case, print the results; return all of it as JSON values."""
    ceiling = measure_ceiling(
        pair.spec.target.dtype, step_cost(pair.spec, 1, prompts.shape[1]).weight_bytes
    )
    conditions = _conditions(pair, prompts, new_tokens, repeats, seed, ceiling)
    plain = dataclasses.replace(
        pair,
        spec=dataclasses.replace(
            pair.spec, drafter=None, num_draft_tokens=0, tree=None, synthetic_acceptance=None
        ),
        drafter_params=None,
    )
    modes = [plain] if pair.spec.drafter is None else [plain, pair]
    console.print(
        f"[bold]{pair.target_name}[/] + {pair.drafter_name or 'no drafter'}{_shape(pair.spec)}\n"
        f"{conditions['dtype']} on {conditions['device']} · jax {conditions['versions']['jax']} · "
        f"{conditions['prompts']} · {new_tokens} new tokens a row, greedy, no stop ids"
    )
    console.print(_ceiling_table(modes, batch_sizes, conditions, ceiling))
    results = []
    for batch in batch_sizes:
        for case in modes:
            result = measure(
                case,
                prompts[:batch],
                ceiling,
                new_tokens=new_tokens,
                repeats=repeats,
                seed=seed,
            )
            results.append(result)
            speed = f"{result.step_ms} ms a step, {result.tokens_per_s} tok/s"
            print(f"batch {batch}, {result.label}: {speed}", file=sys.stderr, flush=True)
    console.print(*_results_tables(results, repeats), sep="\n")
    return {**conditions, "results": [dataclasses.asdict(r) for r in results]}


def _shape(spec: DecodeSpec) -> str:
    if spec.drafter is None:
        return ""
    drafts = f": {spec.num_draft_tokens} drafts a step"
    if spec.tree is None:
        return drafts
    return f"{drafts}, a tree of topk {spec.tree.topk} and depth {spec.tree.depth}"


def _label(spec: DecodeSpec) -> str:
    if spec.drafter is None:
        return "plain"
    return f"{drafter_kind(spec)} {'tree ' if spec.tree else ''}{spec.num_draft_tokens}"


def _conditions(
    pair: Pair, prompts: np.ndarray, new_tokens: int, repeats: int, seed: int, ceiling: Ceiling
) -> dict[str, Any]:
    device = jax.devices()[0]
    packages = ("jax", "jaxlib", "flax", "numpy")
    return {
        "target": pair.target_name,
        "drafter": pair.drafter_name,
        "drafter_kind": drafter_kind(pair.spec),
        "num_draft_tokens": pair.spec.num_draft_tokens,
        "tree": None if pair.spec.tree is None else dataclasses.asdict(pair.spec.tree),
        "synthetic_acceptance": pair.spec.synthetic_acceptance,
        "dtype": pair.spec.target.dtype,
        "device": device.device_kind,
        "platform": device.platform,
        "mesh": dict(pair.mesh.shape),
        "prompts": f"{'held-out' if pair.held_out else 'random'} prompts of {prompts.shape[1]} tokens",
        "prompt_length": prompts.shape[1],
        "new_tokens": new_tokens,
        "temperature": 0.0,
        "repeats": repeats,
        "seed": seed,
        "ceiling": dataclasses.asdict(ceiling),
        "versions": {
            "jaxspec": jaxspec.__version__,
            "python": sys.version.split()[0],
            **{name: importlib.metadata.version(name) for name in packages},
        },
        "command": shlex.join(["jaxspec", *sys.argv[1:]]),
    }


def _ceiling_table(
    modes: Sequence[Pair], batch_sizes: Sequence[int], conditions: dict[str, Any], ceiling: Ceiling
) -> Table:
    table = Table(
        title=f"floor of a step, at {ceiling.bytes_per_s / 1e9:,.0f} GB/s copied and "
        f"{ceiling.flops_per_s / 1e12:.3g} TFLOP/s (both measured just now)",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption="mode: the drafter and its draft tokens. drafting: the drafter's part of the floor.",
        caption_justify="left",
    )
    for name in ("batch", "mode", "weights MB", "K/V MB", "GFLOP", "floor ms", "drafting"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    context = conditions["prompt_length"] + conditions["new_tokens"] // 2
    for batch in batch_sizes:
        for pair in modes:
            rows, together = _of_a_group(pair.mesh, batch, ceiling)
            cost = step_cost(pair.spec, rows, context)
            draft = step_costs(pair.spec, rows, context)[1]
            table.add_row(
                str(batch),
                _label(pair.spec),
                f"{cost.weight_bytes / 1e6:,.1f}",
                f"{cost.kv_bytes / 1e6:,.1f}",
                f"{cost.flops / 1e9:,.3g}",
                f"{step_floor_s(pair.spec, rows, context, together) * 1e3:.3g}",
                "" if pair.spec.drafter is None else f"{draft.floor_s(together) * 1e3:.3g}",
            )
    return table


def _results_tables(results: Sequence[Result], repeats: int) -> list[Table]:
    """Return two tables, so that each fits a narrow terminal: what came out, and what it took."""
    synthetic = any(r.acceptance == "synthetic" for r in results)
    speeds = Table(
        title=f"measured: median (min-max) of {repeats}, warm-up and compilation excluded",
        title_justify="left",
        caption="x floor: step over floor. tok/s: returned, all rows. tau: mean tokens a verify step"
        + (", as --synthetic-acceptance sets them." if synthetic else "."),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
    )
    tau = "set tau" if synthetic else "tau"
    for name in ("batch", "mode", "step ms", "x floor", "tok/s", "speedup", tau):
        speeds.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    details = Table(
        caption="TTFT: prefill of the whole batch. GB/s: the floor's bytes over the step. compile: "
        "prefill + decode. experts: distinct ones a layer, in one target pass.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
    )
    for name in ("batch", "mode", "TTFT ms", "GB/s", "compile s", "peak GB", "experts"):
        details.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    plain = {r.batch_size: r.tokens_per_s.median for r in results if r.mode == "plain"}
    for r in results:
        tau = "" if r.acceptance_length is None else f"{r.acceptance_length:.2f}"
        speeds.add_row(
            str(r.batch_size),
            r.label,
            str(r.step_ms),
            f"{r.step_ms.median / r.floor_ms:.2f}",
            f"{r.tokens_per_s.median:,.0f}",
            "" if r.mode == "plain" else f"{r.tokens_per_s.median / plain[r.batch_size]:.2f}x",
            tau,
        )
        details.add_row(
            str(r.batch_size),
            r.label,
            str(r.ttft_ms),
            f"{r.achieved_bytes_per_s / 1e9:,.0f}",
            f"{r.prefill_compile_s:.1f} + {r.decode_compile_s:.1f}",
            "" if r.peak_bytes is None else f"{r.peak_bytes / 1e9:.1f}",
            "" if r.distinct_experts is None else str(r.distinct_experts),
        )
    return [speeds, details]
