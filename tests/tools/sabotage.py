"""A bench for `jaxspec check`: copies of the bundled pairs, each damaged in one way, and what check says of each.

`python -m tests.tools.sabotage [--jobs N] [OUT.json] [NAME...]` checks all pairs, or those whose name has one of these
words, N at a time, and prints a table. It needs no package that the command does not need.

A pair is caught if the exit code says so, or if a damage that costs nothing is reported as such. It is named if a
message matches the pattern that tells this damage from all others.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from jaxspec.api import BUNDLED
from jaxspec.commands.check import run as checking
from jaxspec.commands.check import search
from jaxspec.commands.cli import app
from jaxspec.commands.startup import versions
from jaxspec.runtime import runtime

Edit = Callable[[Path], None]

SCALE = 13.875  # sqrt of the target's width, as bfloat16 rounds it
REFUSED = "refused"


# --- how a directory is edited -------------------------------------------------------------------


def config(file: str = "config.json", **changes: Any) -> Edit:
    """Change values of a JSON file; of an object only the values that are given."""

    def merged(old: Any, new: Any) -> Any:
        if not isinstance(new, dict) or not isinstance(old, dict):
            return new
        return {**old, **{key: merged(old.get(key), value) for key, value in new.items()}}

    def edit(directory: Path) -> None:
        path = directory / file
        path.write_text(json.dumps(merged(json.loads(path.read_text()), changes)))

    return edit


def tensors(change: Callable[[dict[str, np.ndarray]], None]) -> Edit:
    """Change the tensors of a directory in place; they are float32 while they are changed."""

    def edit(directory: Path) -> None:
        path = directory / "model.safetensors"
        values = {name: x.astype(np.float32) for name, x in load_file(path).items()}
        change(values)
        stored = {n: np.ascontiguousarray(x.astype(ml_dtypes.bfloat16)) for n, x in values.items()}
        save_file(stored, path)

    return edit


def each(pattern: str, change: Callable[[np.ndarray], np.ndarray]) -> Edit:
    """Change every tensor whose name has the pattern."""

    def edit(values: dict[str, np.ndarray]) -> None:
        names = [name for name in values if re.search(pattern, name)]
        assert names, pattern
        for name in names:
            values[name] = change(values[name])

    return tensors(edit)


def swapped(*pairs: tuple[str, str]) -> Edit:
    """Exchange tensors: for each pair the two whose names differ in that part only."""

    def edit(values: dict[str, np.ndarray]) -> None:
        for one, other in pairs:
            names = [name for name in values if one in name]
            assert names, one
            for name in names:
                twin = name.replace(one, other)
                values[name], values[twin] = values[twin], values[name]

    return tensors(edit)


def noise(share: float) -> Callable[[np.ndarray], np.ndarray]:
    """Add noise of so large a share of the tensor's own deviation."""
    random = np.random.default_rng(7)

    def change(x: np.ndarray) -> np.ndarray:
        noisy = x + share * x.std() * random.normal(size=x.shape)
        return noisy.astype(np.float32) if x.ndim > 1 else x

    return change


def with_one(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(x: np.ndarray) -> np.ndarray:
        x = x.copy()
        x.flat[x.size // 2] = value
        return x

    return change


def halves(change: Callable[[np.ndarray, np.ndarray], Sequence[np.ndarray]]) -> Edit:
    """Change what an assistant's first matrix makes of embedding and state."""
    return each("pre_projection", lambda x: np.concatenate(change(*np.split(x, 2, axis=1)), axis=1))


def random_like(x: np.ndarray) -> np.ndarray:
    return (np.random.default_rng(3).normal(size=x.shape) * x.std()).astype(np.float32)


def half_random(x: np.ndarray) -> np.ndarray:
    """Replace every other row of a table."""
    x = x.copy()
    x[1::2] = random_like(x[1::2])
    return x


def of_another_basis(directory: Path) -> None:
    """Renumber a target's hidden units: it says the same, but no drafter of the old one can read it."""
    size = json.loads((directory / "config.json").read_text())["hidden_size"]
    order = np.random.default_rng(0).permutation(size)

    def renumber(x: np.ndarray) -> np.ndarray:
        for axis in range(x.ndim):
            x = np.take(x, order, axis) if x.shape[axis] == size else x
        return x

    each("", renumber)(directory)


def padded_vocabulary(directory: Path) -> None:
    each("embed_tokens", lambda x: np.concatenate([x, x[:64]]))(directory)
    config(vocab_size=3136, vocab_size_per_layer_input=3136)(directory)


# --- the pairs -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sabotage:
    """A pair that is damaged in one way.

    Attributes:
      drafter: which bundled one.
      named: a pattern of the message that names the damage; `REFUSED` where the pair does not load.
      harmless: the damage is known to cost nothing that greedy drafts on this text could show.
    """

    name: str
    drafter: str
    named: str
    edits: tuple[Edit, ...] = ()
    target_edits: tuple[Edit, ...] = ()
    harmless: bool = False


def _dflash(
    name: str, named: str, *edits: Edit, target: Sequence[Edit] = (), harmless: bool = False
) -> Sabotage:
    return Sabotage(name, "dflash", named, edits, tuple(target), harmless)


def _mtp(
    name: str, named: str, *edits: Edit, target: Sequence[Edit] = (), harmless: bool = False
) -> Sabotage:
    return Sabotage(name, "mtp", named, edits, tuple(target), harmless)


def _mask(i: int) -> Edit:
    return config(dflash_config={"mask_token_id": i})


def _features(*layers: int) -> Edit:
    return config(dflash_config={"target_layer_ids": list(layers)})


def _types(*kinds: str) -> Edit:
    return config(layer_types=[f"{kind}_attention" for kind in kinds])


def _rope(kind: str, **values: float) -> dict[str, Any]:
    return {"rope_parameters": {f"{kind}_attention": values}}


FEATURES = r"set dflash_config.target_layer_ids to \[1, 4, 6\]"
MASK = "set dflash_config.mask_token_id to 4"
TYPES = r'set layer_types to \["sliding_attention", "full_attention"\]'
NEW_WEIGHTS = "weights (of the drafter )?differ from those that were measured"
NEW_TARGET = "the target is not the one that was measured"
EXCHANGED = r"{} and {} are exchanged"
ZERO = "{}: all zero"
NOT_FINITE = r"not finite[\s\S]*{}"
O, Q = r"self_attn\.o_proj", r"self_attn\.q_proj"  # noqa: E741

PAIRS: tuple[Sabotage, ...] = (
    _dflash("mask id 0", MASK, _mask(0)),
    _dflash("mask id 1", MASK, _mask(1)),
    _dflash("mask id 2", MASK, _mask(2)),
    _dflash("mask id 3", MASK, _mask(3)),
    _dflash("mask id of a word", MASK, _mask(100)),
    _dflash("rope theta 1e4", "set rope_theta to 1000000", config(rope_theta=1e4)),
    _dflash("rope theta 100", "set rope_theta to 1000000", config(rope_theta=100.0)),
    _dflash("window 16", "sliding_window (to|is)", config(sliding_window=16)),
    _dflash("window 64", "sliding_window", config(sliding_window=64)),
    _dflash("features one lower", FEATURES, _features(0, 3, 5)),
    _dflash("features one higher", REFUSED, _features(2, 5, 7)),
    _dflash("features swapped", FEATURES, _features(4, 1, 6)),
    _dflash("features reversed", FEATURES, _features(6, 4, 1)),
    _dflash("features rotated", FEATURES, _features(4, 6, 1)),
    _dflash("embeddings unscaled", "scale_embeddings to true", config(scale_embeddings=False)),
    _dflash(
        "embeddings must be scaled twice",
        "embeddings scaled twice",
        each("o_proj|down_proj", lambda x: x * SCALE),
    ),
    _dflash(
        "embeddings must not be scaled",
        "scale_embeddings to false",
        each("o_proj|down_proj", lambda x: x / SCALE),
    ),
    _dflash("block of 16", "set block_size to 8", config(block_size=16)),
    _dflash("block of 4", "set block_size to (7|8)", config(block_size=4)),
    _dflash("layer types swapped", TYPES, _types("full", "sliding")),
    _dflash("all layers full", TYPES, _types("full", "full")),
    _dflash("all layers sliding", "layer_types|is_causal", _types("sliding", "sliding")),
    _dflash("no layer causal", r"set is_causal to \[true, false\]", config(is_causal=False)),
    _dflash(
        "causality inverted", r"set is_causal to \[true, false\]", config(is_causal=[False, True])
    ),
    _dflash("all layers causal", "is_causal|causal is", config(is_causal=True), harmless=True),
    _dflash("drafter 30% noise", NEW_WEIGHTS, each("", noise(0.3))),
    _dflash("target 30% noise", NEW_TARGET, target=[each("", noise(0.3))]),
    _dflash(
        "zero norm",
        ZERO.format("layers.1.mlp_norm"),
        each(r"1\.post_attention_layernorm", np.zeros_like),
    ),
    _dflash("zero projection", ZERO.format("layers.1.out"), each("1." + O, np.zeros_like)),
    _dflash("zero fuse", ZERO.format("fuse"), each(r"fc\.", np.zeros_like)),
    _dflash(
        "a NaN", NOT_FINITE.format("layers.0.self_attn.o_proj"), each("0." + O, with_one(np.nan))
    ),
    _dflash("an infinity", NOT_FINITE.format("fc"), each(r"fc\.", with_one(np.inf))),
    _dflash("no soft cap", "soft_?cap", config(final_logit_softcapping=None), harmless=True),
    _dflash("soft cap 5", "soft_?cap", config(final_logit_softcapping=5.0), harmless=True),
    _dflash(
        "target without soft cap",
        "soft_?cap",
        target=[config(final_logit_softcapping=None)],
        harmless=True,
    ),
    _dflash("norms less 1", r"norm scales .*1 \+", each("norm", lambda x: x - 1)),
    _dflash("q and k norm swapped", "q_norm and .*k_norm", swapped(("q_norm", "k_norm"))),
    _dflash("layers swapped", "layers 0 and 1", swapped(("layers.0.", "layers.1."))),
    _dflash(
        "one tensor of two layers swapped",
        EXCHANGED.format("layers.0.out", "layers.1.out"),
        swapped(("layers.0.self_attn.o_proj", "layers.1.self_attn.o_proj")),
    ),
    _dflash(
        "target: zero embedding",
        ZERO.format("embedder.table"),
        target=[each("embed_tokens", np.zeros_like)],
    ),
    _dflash(
        "target: zero norm",
        ZERO.format("layers.3.pre_mlp_norm"),
        target=[each(r"3\.pre_feedforward", np.zeros_like)],
    ),
    _dflash("target: padded vocabulary", REFUSED, target=[padded_vocabulary]),
    _dflash(
        "target: words renumbered",
        NEW_TARGET,
        target=[each("embed_tokens", lambda x: np.roll(x, 7, 0))],
    ),
    _dflash(
        "target: half the vocabulary random",
        NEW_TARGET,
        target=[each("embed_tokens", half_random)],
    ),
    _dflash("target of another basis", NEW_TARGET, target=[of_another_basis]),
    _dflash("four kv heads", REFUSED, config(num_key_value_heads=4)),
    _dflash("head dim 16", REFUSED, config(head_dim=16)),
    _mtp(
        "rope theta of sliding layers 1e6",
        "rope_theta to 10000",
        config(text_config=_rope("sliding", rope_theta=1e6)),
    ),
    _mtp(
        "rope theta of sliding layers 500",
        "rope_theta to 10000",
        config(text_config=_rope("sliding", rope_theta=500.0)),
    ),
    _mtp(
        "rope theta of full layers 1e4",
        "rope_theta",
        config(text_config=_rope("full", rope_theta=1e4)),
    ),
    _mtp(
        "rope theta of full layers 10",
        "full_rope_theta is",
        config(text_config=_rope("full", rope_theta=10.0)),
    ),
    _mtp(
        "rotary factor 1",
        "partial_rotary_factor",
        config(text_config=_rope("full", partial_rotary_factor=1.0)),
    ),
    _mtp("window 64", REFUSED, config(text_config={"sliding_window": 64})),
    _mtp("query position n", "query_position", config(query_position="next"), harmless=True),
    _mtp("random post_projection", "post_projection", each("post_projection", random_like)),
    _mtp(
        "zero post_projection",
        ZERO.format("post_projection"),
        each("post_projection", np.zeros_like),
    ),
    _mtp(
        "embeddings scaled twice",
        "divide the embedding's half",
        halves(lambda e, s: (e * SCALE, s)),
    ),
    _mtp(
        "embeddings not scaled",
        "multiply the embedding's half",
        halves(lambda e, s: (e / SCALE, s)),
    ),
    _mtp("inputs swapped", "swap the halves", halves(lambda e, s: (s, e))),
    _mtp("drafter 30% noise", NEW_WEIGHTS, each("", noise(0.3))),
    _mtp("target 30% noise", NEW_TARGET, target=[each("", noise(0.3))]),
    _mtp("zero norm", ZERO.format("final_norm"), each(r"model\.norm", np.zeros_like)),
    _mtp("zero head", ZERO.format("head"), each("embed_tokens", np.zeros_like)),
    _mtp("a NaN", NOT_FINITE.format("embed_tokens"), each("embed_tokens", with_one(np.nan))),
    _mtp("layer scalar 1", NEW_WEIGHTS, each("layer_scalar", np.ones_like)),
    _mtp("negated post_projection", NEW_WEIGHTS, each("post_projection", np.negative)),
    _mtp("o_proj transposed", "out.* transposed", each("[012]." + O, np.transpose)),
    _mtp("q_proj transposed", "qkv.* transposed", each("[012]." + Q, np.transpose)),
    _mtp("layers 0 and 1 swapped", "layers 0 and 1", swapped(("layers.0.", "layers.1."))),
    _mtp("norms less 1", r"norm scales .*1 \+", each("norm", lambda x: x - 1)),
    _mtp(
        "chain of 12",
        "num_draft_tokens|no measurable difference",
        config("generation_config.json", num_assistant_tokens=12),
        harmless=True,
    ),
    _mtp(
        "target: rope theta 1e5",
        "full_rope_theta",
        target=[config(**_rope("full", rope_theta=1e5))],
    ),
)


# --- the bench -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What check said of a pair.

    Attributes:
      by: the kinds of findings that named the damage.
      said: the verdict, or the refusal.
    """

    name: str
    caught: bool
    named: bool
    by: list[str]
    code: int
    seconds: float
    said: str
    harmless: bool

    @property
    def line(self) -> str:
        words = ("caught" if self.caught else "MISSED", "named" if self.named else "-")
        return f"{self.name:45} {words[0]:7} {words[1]:6} {', '.join(self.by):24} {self.code} {self.seconds:5.1f} s"


def made(pair: Sabotage, directory: Path) -> tuple[str, str]:
    """Copy the bundled pair and damage the copy; return both directories."""
    for name, edits in (("target", pair.target_edits), (pair.drafter, pair.edits)):
        shutil.copytree(BUNDLED / name, directory / name)
        for edit in edits:
            edit(directory / name)
    return str(directory / "target"), str(directory / pair.drafter)


def checked(pair: Sabotage, directory: Path, *options: str) -> Outcome:
    """Damage a pair and check it on the held-out prompts."""
    target, drafter = made(pair, directory)
    target = target if pair.target_edits else "bundled"
    begin = time.perf_counter()
    result = CliRunner().invoke(app, ["check", target, drafter, "--json", "-", *options])
    seconds = time.perf_counter() - begin
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        said = f"traceback: {result.exception!r}"
        return Outcome(pair_name(pair), False, False, [], -1, seconds, said, pair.harmless)
    code = result.exit_code
    if code == 2:
        refused = pair.named == REFUSED or re.search(pair.named, result.stderr) is not None
        return Outcome(
            pair_name(pair), True, refused, [REFUSED], code, seconds, result.stderr, pair.harmless
        )
    report = json.loads(result.stdout)
    findings = report.get("findings")
    if findings is None:
        findings = [{"kind": "", "text": text} for text in report["problems"]]
    by = sorted({f["kind"] for f in findings if re.search(pair.named, f["text"], re.IGNORECASE)})
    told = any("no measurable difference" in f["text"] for f in findings)
    caught = code == 1 or (bool(by) and told)
    said = "; ".join(f"[{f['kind']}] {f['text']}" for f in findings)
    return Outcome(pair_name(pair), caught, bool(by), by, code, seconds, said, pair.harmless)


def pair_name(pair: Sabotage) -> str:
    return f"{pair.drafter}: {pair.name}"


def share_work() -> None:
    """Let all pairs of this process share programs, and take plain decoding's text for speculative decoding's.

    The loop of speculative decoding takes longest to compile, and anew for most pairs. That it writes what
    plain decoding writes is no subject here. One round of search is enough for one damage.
    """
    programs, decode, further = runtime.Programs(), checking.decode_greedily, checking.further
    texts: dict[Any, Any] = {}

    def plainly(target: Any, drafter: Any, *given: Any, **options: Any) -> Any:
        del drafter
        options.pop("drafting", None)
        if target.source not in texts:
            texts[target.source] = decode(target, None, *given, **options)
        return list(texts[target.source])

    def once(target: Any, *given: Any, **options: Any) -> Any:
        key = "further", target.source
        if key not in texts:
            texts[key] = further(target, *given, **options)
        return texts[key]

    runtime.Programs = lambda: programs  # pyright: ignore[reportAttributeAccessIssue]
    checking.decode_greedily, checking.further = plainly, once
    search.MAX_ROUNDS = 1


def outcome_of(pair: Sabotage) -> Outcome:
    """Check a pair in a directory of its own."""
    with tempfile.TemporaryDirectory() as directory:
        return checked(pair, Path(directory))


def outcomes_of(pairs: Sequence[Sabotage], jobs: int) -> Iterator[Outcome]:
    """Check pairs, so many at a time, each of these in a process; yield what is done as it is done."""
    if jobs == 1:
        share_work()
        yield from map(outcome_of, pairs)
        return
    fresh = multiprocessing.get_context("spawn")  # JAX cannot be forked
    with ProcessPoolExecutor(jobs, mp_context=fresh, initializer=share_work) as pool:
        # By their place: what an edit does to a file is a closure, which cannot be sent.
        waiting = {pool.submit(_outcome_at, PAIRS.index(pair)) for pair in pairs}
        for done in as_completed(waiting):
            yield done.result()


def _outcome_at(i: int) -> Outcome:
    return outcome_of(PAIRS[i])


def main() -> None:
    """Check the pairs asked for, print a line for each as it is done, and a table of all."""
    options = argparse.ArgumentParser(prog="python -m tests.tools.sabotage")
    options.add_argument(
        "out", nargs="?", help="a file for the results as JSON, written after each pair"
    )
    options.add_argument("words", nargs="*", help="parts of names; all pairs without any")
    options.add_argument("--jobs", type=int, default=1, help="pairs at a time, each in a process")
    given = options.parse_args()
    names = [pair_name(pair) for pair in PAIRS]
    pairs = [
        pair
        for pair, name in zip(PAIRS, names, strict=True)
        if not given.words or any(word in name for word in given.words)
    ]
    begin, outcomes = time.perf_counter(), []
    for outcome in outcomes_of(pairs, given.jobs):
        outcomes.append(outcome)
        print(f"{len(outcomes):3} of {len(pairs)}  {outcome.line}", flush=True)
        if not outcome.named:
            print("    ", outcome.said[:600], flush=True)
        outcomes.sort(key=lambda o: names.index(o.name))
        report = {
            "versions": versions("jax", "jaxlib", "flax", "numpy"),
            **summary(outcomes, begin),
        }
        if given.out is not None:
            Path(given.out).write_text(json.dumps(report, indent=1))
    print("\n" + "\n".join(outcome.line for outcome in outcomes))
    s = summary(outcomes, begin)
    print(f"{len(outcomes)} pairs: {s['caught']} caught, {s['named']} named, {s['seconds']} s")


def summary(outcomes: Sequence[Outcome], begin: float) -> dict[str, Any]:
    """Count what was caught and named, and list it."""
    return {
        "caught": sum(o.caught for o in outcomes),
        "named": sum(o.named for o in outcomes),
        "seconds": round(time.perf_counter() - begin),
        "pairs": [dataclasses.asdict(o) for o in outcomes],
    }


if __name__ == "__main__":
    main()
