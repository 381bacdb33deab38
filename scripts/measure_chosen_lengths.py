"""Compare `choose_length="survival"` with the better of plain decoding and all drafts, for docs/draft-length.md.

    python -m scripts.measure_chosen_lengths [--json out/chosen_lengths.json]
    python -m scripts.measure_chosen_lengths --bundled --rows 4 --new-tokens 64 --level 1.5   (on a CPU)

The models have random weights: 26B-A4B, or its first layers, and DFlash. What a draft is worth is therefore made up,
and all work is done. Each draft has a chance, by the ease of its row, which is drawn anew every 8 steps. The chance is
the draft's confidence, and with that chance it is accepted. A level is the mean tokens of a step that verifies all
drafts.

The text is made up too: random tokens, which follow from the request and the position alone. So all engines decode the
same text, and need as many experts for it. Random weights would write another text for each choice of drafts, and a
text that repeats itself needs few experts. Each line of the table is of one level:

    plain             tokens a second of an engine without a drafter
    full              of one that verifies all drafts (`never`)
    always, survival  tokens a second against the better of these two. First the engine knows the cost of steps and
                      nothing of the text ("first"), then it runs the same requests once more ("again")

Figures are means of some repeats, each of another text, against the better engine on that text. In brackets is the
slowest one. Time counts from the first tokens of the rows on. Compiling is left out, and so are Python's walks over
what compiling left: a server keeps them from its collector too. One engine has the drafter: its `draft_length` is
another one for each column, so that a step of all drafts is the same program in all of them. The JSON has the drafts
that each run verified, and the seconds of a step of each number: they tell a wrong choice from lost time.

Each slot has two requests, and a run ends when all rows together have the tokens of one for each slot. So no slot is
ever empty. Without the second requests all rows of plain decoding would end together, and of drafted rows the unlucky
ones would end last, in steps that cost as much as those of all rows.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import json
import time
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

import jaxspec
from jaxspec import Engine, Request, Sampling, decode, decode_loop, row_subset
from jaxspec.configs.dflash import default_feature_layers
from jaxspec.constraint import Allowed
from jaxspec.drafters.base import AnyDrafter, Draft
from jaxspec.engine.draft_length import DraftLengthController
from jaxspec.engine.request import Completion
from jaxspec.models.target import Target
from jaxspec.registry import family_of, presets
from jaxspec.sampling import Stream, fold_keys
from jaxspec.shapes import Array, Float, Int
from jaxspec.state import DecodeSpec, DecodeState
from jaxspec.verify import AcceptResult
from jaxspec.weights.define import model_def_of, random_drafter
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.model_def import ModelDef

PRESET = "26b-a4b"
STEPS_OF_EASE, SPREAD_OF_EASE = 8, 1.2
"""Steps for which a row is as easy to draft, and the deviation of the ease, as log-odds. That of drafts is 1."""


# --- made-up drafts ------------------------------------------------------------------------------


def middling_chance(tokens: float, num_draft_tokens: int) -> float:
    """Return the chance of a draft of middling ease, if steps of all drafts commit so many tokens on average."""
    rng, low, high = np.random.default_rng(0), -9.0, 9.0
    ease = SPREAD_OF_EASE * rng.normal(size=(20_000, 1))
    odds = ease + rng.normal(size=(20_000, num_draft_tokens))
    for _ in range(30):
        middle = (low + high) / 2
        survival = np.cumprod(1 / (1 + np.exp(-middle - odds)), axis=1)
        few = 1 + survival.sum(axis=1).mean() < tokens
        low, high = (middle, high) if few else (low, middle)
    return 1 / (1 + np.exp(-low))


def made_up_chances(state: DecodeState, num_draft_tokens: int) -> Float[Array, "B G"]:
    """Return the chance that each draft of the next step is accepted after accepted ones.

    The level of a row travels in its `top_p`, which greedy rows do not use: it is the chance of a draft of
    middling ease.
    """
    step, rows = state.num_steps + 1, state.anchors.shape[0]
    slots = jnp.broadcast_to(
        jnp.arange(num_draft_tokens, dtype=jnp.int32), (rows, num_draft_tokens)
    )
    normal = jax.vmap(jax.vmap(lambda key: jax.random.normal(key, (), jnp.float32)))
    noise = normal(fold_keys(state.keys, step, slots, Stream.DRAFT))
    ease = normal(fold_keys(state.keys, step // STEPS_OF_EASE, slots[:, :1], Stream.TOKEN))
    level = jnp.log(state.sampling.top_p) - jnp.log1p(-state.sampling.top_p)
    return jax.nn.sigmoid(level[:, None] + SPREAD_OF_EASE * ease + noise)


def made_up_text(state: DecodeState, positions: Int[Array, "B R"], size: int) -> Int[Array, "B R"]:
    """Return the tokens of each row's text at these positions."""
    draw = jax.vmap(jax.vmap(lambda key: jax.random.randint(key, (), 0, size, jnp.int32)))
    return draw(fold_keys(state.keys, jnp.zeros_like(state.num_steps), positions, Stream.TOKEN))


def made_up_draft(
    target: Target, drafter: AnyDrafter, spec: DecodeSpec, state: DecodeState
) -> Draft:
    """Do the work of `decode.propose`. Return the next tokens of the text, with their chances."""
    real = _PROPOSE(target, drafter, spec, state)
    num_drafts, size = real.tokens.shape[1], spec.target.config.vocab_size
    positions = state.lengths[:, None] + 1 + jnp.arange(num_drafts, dtype=jnp.int32)
    # The real drafts stay in the data flow, so that XLA does not remove their work.
    tokens = made_up_text(state, positions, size) + jnp.minimum(real.tokens, 0)
    if real.confidence is None:
        return real.replace(tokens=tokens)
    chances = made_up_chances(state, spec.num_draft_tokens)[:, :num_drafts]
    return real.replace(tokens=tokens, confidence=chances + jnp.minimum(real.confidence, 0.0))


def made_up_accept(
    spec: DecodeSpec,
    state: DecodeState,
    draft: Draft,
    logits: Float[Array, "B T V"],
    allowed: Allowed | None = None,
) -> tuple[Float[Array, "B T V"], AcceptResult]:
    """Do the work of `decode.accept`, then accept drafts by their chances. The token after them is the text's."""
    adjusted, real = _ACCEPT(spec, state, draft, logits, allowed)
    accepted = jnp.minimum(real.accepted, 0)
    if num_drafts := draft.tokens.shape[1]:
        slots = jnp.broadcast_to(jnp.arange(num_drafts, dtype=jnp.int32), draft.tokens.shape)
        uniform = jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32)))
        drawn = uniform(fold_keys(state.keys, state.num_steps + 1, slots, Stream.ACCEPT))
        hits = drawn < made_up_chances(state, spec.num_draft_tokens)[:, :num_drafts]
        accepted += jnp.sum(jnp.cumprod(hits.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
        if draft.limit is not None:
            accepted = jnp.minimum(accepted, draft.limit)
    after = (state.lengths + 1 + accepted)[:, None]
    bonus = made_up_text(state, after, spec.target.config.vocab_size)[:, 0]
    bonus = jnp.where(real.bonus < 0, real.bonus, bonus)
    return adjusted, real.replace(accepted=accepted, bonus=bonus)


@contextlib.contextmanager
def made_up_text_and_drafts() -> Iterator[None]:
    """Let all text and all drafts be made up in this block. The product knows nothing of it."""
    with (
        mock.patch.multiple(decode, propose=made_up_draft, accept=made_up_accept),
        mock.patch.object(decode_loop, "propose", made_up_draft),
    ):
        yield


_PROPOSE, _ACCEPT = decode.propose, decode.accept


# --- engines -------------------------------------------------------------------------------------


def random_model(model_def: ModelDef, seed: int) -> LoadedModel:
    """Return a model of random weights."""
    params = family_of(model_def.config).randomise(model_def.random_params(seed), seed)
    return LoadedModel(model_def, params, model_def.config, None, Path(), "random weights")


def random_pair(layers: int) -> tuple[LoadedModel, LoadedModel]:
    """Return the first layers of the target, and a DFlash drafter of full size for them.

    It reads as many features as that for the whole target, some of them twice.
    """
    target = model_def_of(presets()[PRESET], "bfloat16")
    cut = dataclasses.replace(target.config, layer_types=target.config.layer_types[:layers])
    drafter, _ = random_drafter(PRESET, "dflash", "bfloat16")
    features = default_feature_layers(layers, len(drafter.config.feature_layers))
    fitted = dataclasses.replace(drafter.config, feature_layers=features, num_target_layers=layers)
    models = (dataclasses.replace(target, config=cut), dataclasses.replace(drafter, config=fitted))
    return random_model(models[0], 0), random_model(models[1], 1)


class Measured(NamedTuple):
    """One run of all requests.

    Attributes:
      tokens: after the first ones.
      steps: steps of rows, by the drafts that they verified. Some are later than these tokens.
    """

    tokens: int
    seconds: float
    steps: dict[int, int]

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def measured(engine: Engine, requests: Sequence[Request], tokens: int) -> Measured:
    """Run requests until their rows have so many tokens more, and cancel the rest of them.

    Time counts from the first tokens of all slots on. There have to be enough requests for full slots.
    """
    so_far: dict[Hashable, int] = {}
    done: dict[Hashable, Completion] = {}
    begin, before = 0.0, 0
    compile_s = engine.timings.compile_s
    engine.reset()
    for id, request in enumerate(requests):
        engine.add(dataclasses.replace(request, id=id))
    while not begin or sum(so_far.values()) < before + tokens:
        events = engine.step()
        so_far |= {event.id: len(event.token_ids) for event in events}
        done |= {event.id: event for event in events if isinstance(event, Completion)}
        if not begin and len(so_far) >= engine.batch_size:
            begin, before = time.perf_counter(), sum(so_far.values())
    ends, made = time.perf_counter(), sum(so_far.values()) - before
    for id in so_far.keys() - done.keys():
        engine.cancel(id)
    done |= {event.id: event for event in engine.step() if isinstance(event, Completion)}
    assert engine.timings.compile_s == compile_s, "a program was compiled meanwhile"
    assert not any(completion.error for completion in done.values()), done
    steps = Counter(length for c in done.values() for length in c.verify_lengths)
    return Measured(made, ends - begin, dict(sorted(steps.items())))


def with_choice(known: DraftLengthController, choose: str) -> DraftLengthController:
    """Return a controller that knows what a warm one knows of costs, and has seen no text."""
    fresh = copy.copy(known)
    fresh.choose = choose
    fresh._call = fresh._result = fresh._prepared = None
    fresh.chooser, fresh.gate = copy.deepcopy((known.chooser, known.gate))
    if choose != "survival":
        fresh.gate = None
    if choose == "never":
        fresh.chooser = None
    return fresh


def compare(
    target: LoadedModel,
    drafter: LoadedModel,
    prompts: Sequence[tuple[int, ...]],
    new_tokens: int,
    levels: Sequence[float],
    repeats: int,
) -> Iterator[tuple[float, dict[int, float], dict[str, list[Measured]]]]:
    """Yield each level, the seconds of a step by drafts, and the runs of all kinds.

    There is a slot for each prompt, and two requests with it.
    """
    asked_tokens = len(prompts) * (new_tokens - 1)

    def requests(chance: float, text: int = 0) -> list[Request]:
        sampling, of_slots = Sampling(top_p=chance), [*prompts] * 2
        first = text * len(of_slots)
        return [Request(p, new_tokens, sampling, seed=first + i) for i, p in enumerate(of_slots)]

    options: dict[str, Any] = dict(requests=requests(1.0), batch_size=len(prompts))
    plain = Engine.fitting(target, None, **options)
    engine = Engine.fitting(target, drafter, choose_length="survival", **options)
    with mock.patch.object(row_subset, "counts", return_value=()):
        for made in (plain, engine):
            made.warm_up({len(prompts[0])})
    print(f"{len(prompts)} rows: {engine.timings.compile_s:.0f} s of compiling", flush=True)
    known = engine.draft_length
    costs = {drafts: use.step_s or 0.0 for drafts, use in known.used.items()}
    engine.draft_length = with_choice(known, "always")
    for made in (plain, engine):
        measured(made, requests(0.5), len(prompts) * 16)  # a first run takes longer
    gc.collect()
    gc.freeze()
    for level in levels:
        chance = middling_chance(level, engine.spec.num_draft_tokens)
        runs: dict[str, list[Measured]] = defaultdict(list)
        for text in range(repeats):
            asked = requests(chance, text)
            runs["plain"].append(measured(plain, asked, asked_tokens))
            for choose in ("never", "always", "survival"):
                engine.draft_length = with_choice(known, choose)
                runs[choose].append(measured(engine, asked, asked_tokens))
                if choose != "never":
                    runs[f"{choose}, again"].append(measured(engine, asked, asked_tokens))
        yield level, costs, runs


def main(
    rows: Annotated[list[int], typer.Option(min=1)] = [8, 32],  # noqa: B006
    level: Annotated[list[float], typer.Option(min=1)] = [1.2, 1.6, 2.5, 4, 6, 12],  # noqa: B006
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 64,
    new_tokens: Annotated[int, typer.Option(min=2)] = 900,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    layers: Annotated[int, typer.Option(min=6, help="of the target")] = 6,
    bundled: Annotated[bool, typer.Option("--bundled", help="the bundled pair instead")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
) -> None:
    """Measure and print a table."""
    began = time.perf_counter()
    target, drafter = jaxspec.load() if bundled else random_pair(layers)
    assert drafter is not None
    table = Table("rows", "level", "plain", "full", "always", "again", "survival", "again")
    rng, found = np.random.default_rng(0), []
    for batch in rows:
        ids = rng.integers(5, target.config.vocab_size, (batch, prompt_tokens)).tolist()
        prompts = [*map(tuple, ids)]
        for tokens, costs, runs in compare(target, drafter, prompts, new_tokens, level, repeats):
            speeds = {name: [run.speed for run in of] for name, of in runs.items()}
            better = np.maximum(speeds["plain"], speeds["never"])
            changes = {name: np.asarray(of) / better - 1 for name, of in speeds.items()}
            cells = [f"{np.mean(speeds[name]):,.0f}" for name in ("plain", "never")]
            for name in list(changes)[2:]:
                cells.append(f"{changes[name].mean():+.1%} ({changes[name].min():+.1%})")
            table.add_row(str(batch), f"{tokens:g}", *cells)
            print(
                f"{time.perf_counter() - began:.0f} s: {batch} rows, {tokens:g}: {cells}",
                flush=True,
            )
            values = {name: [run._asdict() for run in of] for name, of in runs.items()}
            found.append({"rows": batch, "level": tokens, "step_s": costs, "runs": values})
            if json_path is not None:  # a run that is cut off leaves what it has
                json_path.parent.mkdir(parents=True, exist_ok=True)
                about = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
                about |= {"models": "bundled" if bundled else f"{PRESET}, {layers} layers"}
                about |= {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens}
                json_path.write_text(json.dumps({**about, "found": found}) + "\n")
    console = Console(width=120)
    console.print(table)
    console.print(
        f"{'bundled' if bundled else f'{PRESET}, {layers} layers'}, {prompt_tokens} + {new_tokens} tokens "
        f"a row, {jax.devices()[0].device_kind}, jax {jax.__version__}, "
        f"{time.perf_counter() - began:.0f} s in all"
    )


if __name__ == "__main__":
    with made_up_text_and_drafts():
        typer.run(main)
