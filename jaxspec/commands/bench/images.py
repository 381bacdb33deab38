"""`jaxspec bench --images`: the vision part by itself, and the first token after an image.

Read `run`. Each number of tokens that images are resized to has its program, which is timed beside
its floor. `floor.image_cost` counts bytes and operations.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from rich import box
from rich.console import Group
from rich.table import Table

from jaxspec.commands.bench.floor import Ceiling, call_seconds, image_cost, measure_ceiling
from jaxspec.commands.bench.pair import ModelPair, bench_cache_length
from jaxspec.commands.bench.results import Spread, digits
from jaxspec.commands.options import UsageError
from jaxspec.commands.progress import Notify
from jaxspec.configs.gemma4_vision import IMAGE_TOKENS, Gemma4VisionConfig
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from jaxspec.runtime.programs import Programs
from jaxspec.runtime.runtime import embed_images, padded_to_a_budget
from jaxspec.shapes import Params
from jaxspec.text.images import ImagePatches
from jaxspec.weights.model_def import ModelDef
from jaxspec.weights.sharding import place_rows

TEXT_TOKENS = 64
"""Tokens of text in a prompt with an image."""
CHAIN = 4  # starting a call overlaps with the one before


@dataclass(frozen=True)
class ImageResult:
    """One image through the vision part.

    Attributes:
      tokens: that the image becomes.
      weight_bytes, flops: the least that it reads and computes.
      image_ms: with pixels on the device.
      temporary_bytes: of the program; None if the compiler does not report them.
    """

    tokens: int
    patches: int
    weight_bytes: float
    flops: float
    floor_ms: float
    image_ms: Spread
    compile_s: float
    temporary_bytes: int | None


@dataclass(frozen=True)
class FirstTokenResult:
    """Milliseconds from a prompt in an engine to its first token, with nothing beside it.

    Attributes:
      prompt_tokens: of both prompts.
      image_tokens: of the one image of one of them, whose pixels are on the host.
      peak_bytes: of the process so far; None if the device does not count them.
    """

    prompt_tokens: int
    image_tokens: int
    text_ms: Spread
    image_ms: Spread
    peak_bytes: int | None


def most_positions(text_tokens: int | None) -> int:
    """Return the positions of the longest prompt with an image, and one new token."""
    return (TEXT_TOKENS if text_tokens is None else text_tokens) + 2 + IMAGE_TOKENS[-1] + 1


def image_of(config: Gemma4VisionConfig, tokens: int, seed: int) -> ImagePatches:
    """Return random pixels that become so many tokens."""
    rows = next(n for n in range(math.isqrt(tokens), 0, -1) if tokens % n == 0)
    columns = tokens // rows * config.pool_size
    y, x = np.divmod(np.arange(rows * config.pool_size * columns, dtype=np.int32), columns)
    shape = len(x), 3 * config.patch_size**2
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    return ImagePatches(pixels, np.stack([x, y], axis=1), tokens)


def measure_images(
    vision: ModelDef,
    params: Params,
    ceiling: Ceiling,
    mesh: Mesh,
    *,
    repeats: int,
    seed: int,
    notify: Notify = lambda _: None,
) -> Iterator[ImageResult]:
    """Yield what one image of each number of tokens takes."""
    programs = Programs()
    for tokens in IMAGE_TOKENS:
        notify(f"an image of {tokens} tokens")
        image = image_of(vision.config, tokens, seed)
        args = params, *place_rows(padded_to_a_budget(image, vision), mesh)
        begin = time.perf_counter()
        program = programs.get(embed_images, args, donate=None, mesh=mesh, spec=vision)
        compile_s = time.perf_counter() - begin
        seconds = call_seconds(functools.partial(program, *args), repeats, CHAIN)
        cost, sizes = image_cost(vision, tokens), program.memory_analysis()
        yield ImageResult(
            tokens,
            len(image.pixels),
            cost.weight_bytes,
            cost.flops,
            cost.floor_s(ceiling) * 1e3,
            Spread.of(seconds, 1e3),
            compile_s,
            None if sizes is None else sizes.temp_size_in_bytes,
        )


def measure_first_token(
    pair: ModelPair,
    *,
    repeats: int,
    seed: int,
    text_tokens: int | None = None,
    notify: Notify = lambda _: None,
) -> FirstTokenResult:
    """Measure the first token of a prompt with an image, beside a prompt of text as long.

    Args:
      text_tokens: around the image; None: `TEXT_TOKENS`.
    """
    target, drafter = pair.loaded
    assert target.vision is not None
    config: Gemma4VisionConfig = target.vision.config
    count, rng = config.image_tokens, np.random.default_rng(seed)
    around = TEXT_TOKENS if text_tokens is None else text_tokens
    length = around + 2 + count
    spec = pair.spec
    engine = Engine(
        *(target, drafter),
        drafting=spec.drafting,
        program_features=spec.program_features,
        cache_length=bench_cache_length(spec, length + 1),
        read_ahead=0,
    )
    # Below all special tokens of images.
    limit = min(config.image_token_id, config.begin_token_id, config.end_token_id)
    text = tuple(rng.integers(limit, size=length).tolist())
    half = around // 2
    of_image = config.begin_token_id, *[config.image_token_id] * count, config.end_token_id
    with_image = text[:half] + of_image + text[half : length - len(of_image)]

    def seconds(prompt: tuple[int, ...], images: tuple[ImagePatches, ...] = ()) -> float:
        begin = time.perf_counter()
        engine.add(Request(prompt, 1, pair.sampling, images=images))
        while not engine.is_idle:
            engine.step()
        return time.perf_counter() - begin

    of_text, of_images = [], []
    for repeat in range(repeats + 1):  # the first compiles
        notify(f"first tokens, run {repeat} of {repeats}" if repeat else "compiling")
        of_text.append(seconds(text))
        of_images.append(seconds(with_image, (image_of(config, count, seed + repeat),)))
    return FirstTokenResult(
        length,
        count,
        Spread.of(of_text[1:], 1e3),
        Spread.of(of_images[1:], 1e3),
        (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
    )


def run(
    pair: ModelPair,
    *,
    repeats: int,
    seed: int,
    text_tokens: int | None = None,
    notify: Notify = lambda _: None,
) -> tuple[Ceiling, list[ImageResult], FirstTokenResult]:
    """Measure the vision part, and then first tokens.

    Raises:
      UsageError: the target has no vision part.
    """
    target, _ = pair.loaded
    if (vision := target.vision) is None:
        raise UsageError(f"--images: {pair.target_name} has no vision part")
    model_def = vision.model_def
    notify("measuring the device")
    ceiling = measure_ceiling(model_def.dtype, image_cost(model_def, 1).weight_bytes)
    options: dict[str, Any] = dict(repeats=repeats, seed=seed, notify=notify)
    results = list(measure_images(model_def, vision.params, ceiling, pair.mesh, **options))
    return ceiling, results, measure_first_token(pair, text_tokens=text_tokens, **options)


def to_json(results: list[ImageResult], first: FirstTokenResult | None) -> dict[str, Any]:
    """Return results as JSON values."""
    values: dict[str, Any] = {"images": [dataclasses.asdict(r) for r in results]}
    return values if first is None else values | {"first_token": dataclasses.asdict(first)}


def render(ceiling: Ceiling, results: list[ImageResult], first: FirstTokenResult) -> Group:
    """Return the tables, whole at 80 columns."""
    title = (
        f"one image through the vision part; its floor at {digits(ceiling.bytes_per_s / 1e9)} GB/s "
        f"read and {digits(ceiling.flops_per_s / 1e12)} TFLOP/s, measured just now"
    )
    images = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    headings = ("tokens", "patches", "MB read", "TFLOP", "floor ms", "ms", "in floors", "MB beside")
    for heading in headings:
        images.add_column(heading, justify="right", no_wrap=True)
    for r in results:
        beside = r.temporary_bytes
        images.add_row(
            f"{r.tokens:,}",
            f"{r.patches:,}",
            digits(r.weight_bytes / 1e6),
            digits(r.flops / 1e12),
            digits(r.floor_ms),
            digits(r.image_ms.median),
            f"{r.image_ms.median / r.floor_ms:.2f}",
            "?" if beside is None else digits(beside / 1e6),
        )
    title = f"milliseconds to the first token of a prompt of {first.prompt_tokens} tokens"
    prompts = Table("", "ms", box=box.SIMPLE_HEAD, title=title, title_justify="left")
    prompts.add_row("text", str(first.text_ms))
    prompts.add_row(f"with an image of {first.image_tokens} tokens", str(first.image_ms))
    peak = first.peak_bytes
    memory = [] if peak is None else [f"{digits(peak / 1e9)} GB of memory at the peak"]
    return Group(images, prompts, *memory)
