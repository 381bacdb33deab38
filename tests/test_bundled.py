"""The bundled pair: its files, and that it is good enough to show what speculation does."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import lzma
import math
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.api import BUNDLED
from jaxspec.engine.engine import Completion, Request
from jaxspec.options import Tree
from jaxspec.tokenizer import Tokenizer
from jaxspec.weights.loading import LoadedModel, load_drafter, load_target
from tests.cases import engine_of, run

ROOT = Path(__file__).parents[1]
HELD_OUT = json.loads((BUNDLED / "held_out.json").read_text())
PROMPTS = [tuple(prompt["ids"]) for prompt in HELD_OUT["prompts"]]
NEW_TOKENS = 128


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return load_target(str(BUNDLED / "target"), dtype="float32")


@pytest.fixture(scope="module")
def drafter() -> LoadedModel:
    return load_drafter(str(BUNDLED / "dflash"), dtype="float32")


@pytest.fixture(scope="module")
def assistant() -> LoadedModel:
    return load_drafter(str(BUNDLED / "mtp"), dtype="float32")


@pytest.fixture(scope="module")
def completions(target: LoadedModel, drafter: LoadedModel) -> list[Completion]:
    return continued(target, drafter)


def continued(
    target: LoadedModel,
    drafter: LoadedModel,
    new_tokens: int = NEW_TOKENS,
    prompts: Sequence[tuple[int, ...]] = PROMPTS,
    **options: Any,
) -> list[Completion]:
    """Continue held-out prompts greedily, speculating, with programs that test_recomputation has too."""
    engine = engine_of(target, drafter, batch_size=8, cache_length=256, **options)
    return run(engine, [Request(ids, new_tokens) for ids in prompts])


def acceptance_length(completions: list[Completion]) -> float:
    return float(np.mean([n for done in completions for n in done.acceptance_lengths]))


def size(*names: str) -> int:
    return sum(f.stat().st_size for name in names for f in (BUNDLED / name).rglob("*"))


def test_the_files_are_small() -> None:
    assert 7_000_000 < size("target", "dflash") <= 8_000_000
    assert 1_000_000 < size("mtp") <= 3_000_000


def test_held_out_prompts_are_sixteen_of_64_ids_from_held_out_files(target: LoadedModel) -> None:
    assert len(PROMPTS) == 16
    for prompt in HELD_OUT["prompts"]:
        ids = prompt["ids"]
        assert len(ids) == 64
        assert ids[0] == 2
        assert all(4 < i < target.config.vocab_size for i in ids[1:])
        assert prompt["file"] in HELD_OUT["files"]


def test_held_out_files_are_in_the_manifest_of_the_corpus() -> None:
    lines = (ROOT / "scripts" / "train_bundled" / "manifest.txt").read_text().splitlines()
    hashes = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    assert len(hashes) == len(lines) > 1000
    assert len(HELD_OUT["files"]) == 20
    for name, entry in HELD_OUT["files"].items():
        assert hashes[name] == entry["sha256"]
        assert len(bytes.fromhex(entry["sha256"])) == hashlib.sha256().digest_size


def test_the_tokenizer_gives_any_text_back() -> None:
    tokenizer = Tokenizer.load(BUNDLED / "target")
    text = "def f(x):\n\treturn  'é ∀ 漢字 🙂' # \r\n\n    \x00 end "
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id == 2
    assert tokenizer.decode(ids[1:]) == text


def test_bits_per_byte_on_held_out_modules_beat_xz(target: LoadedModel) -> None:
    """The running Python's own copy of a few held-out modules: near what was held out, and never seen."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    texts = [(stdlib / name).read_text() for name in ("copy.py", "filecmp.py", "string.py")]
    tokenizer, window = Tokenizer.load(BUNDLED / "target"), 256
    bits = 0.0
    for text in texts:
        ids = np.asarray(tokenizer.encode(text))[1:]
        rows = np.zeros((math.ceil(len(ids) / window), window + 1), np.int32)
        rows[:, 0] = 2
        rows[:, 1:].flat[: len(ids)] = ids
        bits += float(_nats(target, rows)[: len(ids)].sum()) / math.log(2)
    data = "".join(texts).encode()
    xz = 8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) / len(data)
    # Cut into windows of 256 tokens, each read without what came before: harder than the real measure.
    assert bits / len(data) < 0.9 * xz


def _nats(target: LoadedModel, rows: np.ndarray) -> np.ndarray:
    @jax.jit
    def run(params: dict[str, jax.Array], rows: jax.Array) -> jax.Array:
        b, t = rows.shape[0], rows.shape[1] - 1
        start, count = jnp.zeros(b, jnp.int32), jnp.full(b, t, jnp.int32)
        logits = target.model_def.bind(params)(rows[:, :-1], start, count, None).logits
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        return -jnp.take_along_axis(logprobs, rows[:, 1:, None], axis=-1)[..., 0]

    padded = np.pad(rows, ((0, -len(rows) % 8), (0, 0)))
    return np.concatenate(
        [
            np.asarray(run(target.params, jnp.asarray(padded[i : i + 8])))
            for i in range(0, len(rows), 8)
        ]
    ).reshape(-1)


def test_greedy_text_does_not_loop_and_is_drafted_well(completions: list[Completion]) -> None:
    shares = []
    for done in completions:
        assert done.error is None
        ids = done.token_ids
        grams = [ids[i : i + 4] for i in range(len(ids) - 3)]
        shares.append(len(set(grams)) / len(grams))
    assert np.mean(shares) >= 0.5
    assert acceptance_length(completions) >= 2.5


@pytest.mark.slow
def test_the_assistant_drafts_well_and_a_tree_of_its_drafts_better(
    target: LoadedModel, assistant: LoadedModel, completions: list[Completion]
) -> None:
    prompts = PROMPTS[:8]
    chain = continued(target, assistant, 64, prompts, num_draft_tokens=5)
    tree = continued(target, assistant, 64, prompts, num_draft_tokens=11, tree=Tree(3, 5))
    print(f"chain {acceptance_length(chain):.3f}, tree {acceptance_length(tree):.3f}")
    assert acceptance_length(chain) >= 2.5
    assert acceptance_length(tree) > acceptance_length(chain)
    same = [
        a.token_ids == b.token_ids == c.token_ids[:64]
        for a, b, c in zip(chain, tree, completions[: len(prompts)], strict=True)
    ]
    assert np.mean(same) >= 7 / 8  # a near-tie of the target's may go either way


def test_transformers_reads_the_assistant_as_we_do(
    target: LoadedModel, assistant: LoadedModel
) -> None:
    torch = pytest.importorskip("torch")
    from transformers import Gemma4AssistantForCausalLM

    directory = str(BUNDLED / "mtp")
    model = Gemma4AssistantForCausalLM.from_pretrained(directory, dtype=torch.float32)
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    np.testing.assert_array_equal(
        state["pre_projection.weight"].T, assistant.params["pre_projection"]
    )
    np.testing.assert_array_equal(state["model.embed_tokens.weight"], assistant.params["head"])
    np.testing.assert_array_equal(state["model.norm.weight"], assistant.params["final_norm"])
    assert model.config.backbone_hidden_size == target.config.hidden_size
    assert model.generation_config.num_assistant_tokens == assistant.config.num_draft_tokens


def test_transformers_continues_a_prompt_with_the_same_tokens(
    completions: list[Completion],
) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoTokenizer, Gemma4ForCausalLM

    directory = str(BUNDLED / "target")
    model = Gemma4ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    out = model.generate(
        torch.tensor(PROMPTS[:2]),
        max_new_tokens=32,
        min_new_tokens=32,
        do_sample=False,
        top_k=None,
        top_p=None,
    )
    assert [tuple(row[64:].tolist()) for row in out] == [c.token_ids[:32] for c in completions[:2]]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer("x = 1").input_ids == list(Tokenizer.load(directory).encode("x = 1"))


def test_training_and_decoding_draft_the_same(
    target: LoadedModel, drafter: LoadedModel, completions: list[Completion]
) -> None:
    """What the training script says of a finished text is what the decode loop did while writing it."""
    from scripts.train_bundled.drafter import acceptance_lengths, drafts

    text = jnp.asarray([PROMPTS[i] + completions[i].token_ids for i in range(4)])
    model_defs = (target.model_def, drafter.model_def)
    draft = functools.partial(drafts, model_defs, target.params, drafter.params)
    expected = acceptance_lengths(draft, text, 64, NEW_TOKENS - 8)
    for steps, done in zip(expected, completions, strict=False):
        assert done.acceptance_lengths[: len(steps)] == tuple(steps)


def test_training_finds_the_tokens_that_repeat_a_4_gram() -> None:
    from scripts.train_bundled.refine import completes_a_repeat

    rows = np.random.default_rng(0).integers(0, 3, (4, 60))
    expected = np.zeros(rows.shape, bool)
    for row, repeats in zip(rows.tolist(), expected, strict=True):
        grams = [tuple(row[i : i + 4]) for i in range(len(row) - 3)]
        repeats[3:] = [gram in grams[:i] for i, gram in enumerate(grams)]
    assert 0 < expected.mean() < 1
    np.testing.assert_array_equal(completes_a_repeat(jnp.asarray(rows)), expected)


@pytest.mark.slow  # three programs; by default `test_prefix_chains` shortens prefixes of the tiny pairs
def test_a_prefix_that_was_shortened_twice_gives_the_text_of_a_cold_run(
    target: LoadedModel, drafter: LoadedModel
) -> None:
    """Each prompt parts from the one before within the slack of the rings, and the third one not from the first.

    The rings of the second one's row still held positions of the first. Its entry was stored as if they did not, so
    the third one read keys of other positions.
    """
    text = Tokenizer.load(BUNDLED / "target").encode(inspect.getsource(inspect))[:400]
    other = tuple(reversed(text))
    prompts = [text, text[:340] + other[:5], text[:290] + other[5:14]]
    options: dict[str, Any] = dict(batch_size=1, cache_length=640, choose_length="never")
    cold = engine_of(target, drafter, **options)
    hot = engine_of(target, drafter, prefix_bytes=2**28, **options)
    cached = []
    for prompt in prompts:
        done, expected = (run(engine, [Request(prompt, 48)])[0] for engine in (hot, cold))
        assert done.token_ids == expected.token_ids
        assert done.acceptance_lengths == expected.acceptance_lengths
        cached.append(done.cached_tokens)
    assert cached == [0, 340, 0]
