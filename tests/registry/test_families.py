"""A target, or a drafter, is one new module, one table of conversion rules and one registry entry.

The ones in `tests/toy` are registered here, and then do all that Gemma 4 and its drafters do, without an edit
in jaxspec: they convert both ways, load, decode, are costed, checked and benchmarked.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec import registry
from jaxspec.commands.bench import floor
from jaxspec.commands.bench.floor import target_cost
from jaxspec.commands.bench.pair import make_pair
from jaxspec.commands.check.hypotheses import Hypothesis, alternatives, in_force
from jaxspec.commands.models import ModelOptions
from jaxspec.configs.base import ConfigError
from jaxspec.configs.gemma4 import PRESETS as GEMMA4_PRESETS
from jaxspec.engine.engine import Completion, Engine, Request
from jaxspec.models.gemma4 import Gemma4
from jaxspec.options import Drafting
from jaxspec.runtime import memory
from jaxspec.weights.bridge import from_hf_names, to_hf_names
from jaxspec.weights.conversion import convert, to_hf
from jaxspec.weights.loading import CheckpointError, LoadedModel, load_drafter, load_target
from jaxspec.weights.manifest import Manifest
from jaxspec.weights.model_def import ModelDef
from jaxspec.weights.sharding import make_mesh
from tests.checkpoints_convert import hf_layout
from tests.checkpoints_convert.hf_layout import TINY
from tests.toy import entries
from tests.toy.drafter import RecallConfig
from tests.toy.target import ToyConfig

V, D, N, H = 64, 32, 2, 16
TARGET = dict(
    model_type="toy",
    vocab_size=V,
    width=D,
    heads=N,
    head_dim=H,
    max_position_embeddings=512,
    eos_token_id=1,
)
DRAFTER = dict(  # with a model_type of the target's, as some have
    architectures=["RecallModel"], model_type="toy", vocab_size=V, num_draft_tokens=4
)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
    registry.register(entries.TARGET)
    registry.register(entries.DRAFTER)


def write(directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A checkpoint of the toy target as another project would write it.

    The token itself counts for more than attention, so that what followed it before often follows again.
    """
    rng = np.random.default_rng(0)
    shapes = {
        "embed.weight": (V, D),
        "block.norm.weight": (D,),
        "block.q.weight": (N * H, D),
        "block.k.weight": (H, D),
        "block.v.weight": (H, D),
        "block.q_norm.weight": (H,),
        "block.k_norm.weight": (H,),
        "block.out.weight": (D, N * H),
        "norm.weight": (D,),
        "lm_head.weight": (V, D),
        "extra.weight": (3,),
    }
    tensors = {f"toy.{n}": rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}
    tensors["toy.block.out.weight"] *= 0.03
    return write(tmp_path / "target", TARGET, tensors)


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    bigrams = np.random.default_rng(1).normal(size=(V, V)).astype(np.float32)
    return write(tmp_path / "drafter", DRAFTER, {"bigrams.weight": bigrams})


def load(target: Path, drafter: Path) -> tuple[LoadedModel, LoadedModel]:
    return (
        load_target(str(target), dtype="float32"),
        load_drafter(str(drafter), dtype="float32"),
    )


def test_conversion_both_ways(target: Path, drafter: Path, tmp_path: Path):
    for source, name in ((target, "toy"), (drafter, "recall")):
        ours, back = tmp_path / f"{name}-ours", tmp_path / f"{name}-back"
        assert convert(source, ours).kind == name
        assert Manifest.read(ours).kind == name
        to_hf(ours, back)
        original, again = (load_file(d / "model.safetensors") for d in (source, back))
        assert set(original) - set(again) <= {"toy.extra.weight"}
        for tensor, array in again.items():
            np.testing.assert_array_equal(array, original[tensor])
        role = load_target if name == "toy" else load_drafter
        direct, converted = (role(str(d), dtype="float32") for d in (source, ours))
        assert direct.config == converted.config
        assert direct.params.keys() == converted.params.keys()
        for param, array in direct.params.items():
            np.testing.assert_array_equal(array, converted.params[param])
        tensors = to_hf_names(direct.params, direct.config)
        assert set(tensors) == set(again)
        round_trip = from_hf_names(tensors, direct.config)
        for param, array in direct.params.items():
            np.testing.assert_array_equal(array, round_trip[param])


def test_what_they_are_is_said_in_messages(target: Path, drafter: Path):
    with pytest.raises(CheckpointError, match="is a recall drafter; expected a target"):
        load_target(str(drafter), dtype="float32")
    with pytest.raises(CheckpointError, match=r"expected a DFlash drafter .* a recall drafter"):
        load_drafter(str(target), dtype="float32")


PROMPTS = ((2, 5, 9, 30), (7,), (3, 4, 3, 4, 3, 4, 3), (60, 2, 60, 2), (11, 12))
NEW_TOKENS = 40


def steps_of(
    prompt: Sequence[int], tokens: Sequence[int], drafter: LoadedModel, *, recall: bool
) -> list[int]:
    """Return the tokens that each step commits, if the drafter knows just what was committed before it."""
    table = np.argmax(np.asarray(drafter.params["bigrams"]), axis=-1).tolist()
    text, steps = [*prompt, *tokens], []
    length = len(prompt) + 1
    while length < len(text):
        followers = dict(pairwise(text[:length])) if recall else {}
        draft, accepted = text[length - 1], 0
        for token in text[length : length + drafter.config.num_draft_tokens]:
            draft = followers.get(draft, table[draft])
            if draft != token:
                break
            accepted += 1
        steps.append(accepted + 1)
        length += accepted + 1
    return steps


def test_decoding_is_lossless(target: Path, drafter: Path):
    """The drafter is shown the tokens that were kept, and no others, also in a slot that is used again."""
    models = load(target, drafter)
    requests = [Request(p, NEW_TOKENS, stop_ids=()) for p in PROMPTS]

    def run(drafter: LoadedModel | None) -> list[Completion]:
        engine = Engine(models[0], drafter, batch_size=2, cache_length=128)
        done = {e.id: e for e in engine.run(requests) if isinstance(e, Completion)}
        return [done[row] for row in range(len(requests))]

    plain = [done.token_ids for done in run(None)]
    assert all(len(tokens) == NEW_TOKENS for tokens in plain)
    config = dataclasses.replace(models[1].config, recall=False)
    model_def = dataclasses.replace(models[1].model_def, config=config)
    by_table = dataclasses.replace(models[1], model_def=model_def, config=config)
    taus = []
    for recall, drafting in ((True, models[1]), (False, by_table)):
        done = run(drafting)
        assert [d.token_ids for d in done] == plain
        for prompt, d in zip(PROMPTS, done, strict=True):
            expected = steps_of(prompt, d.token_ids, drafting, recall=recall)
            assert list(d.acceptance_lengths)[:-1] == expected[:-1]  # the last may be cut
        taus.append(np.mean([n for d in done for n in d.acceptance_lengths]))
    assert taus[0] > 1.4 > 1.1 > taus[1]


def test_costs(target: Path, drafter: Path):
    """An embedding of its own is only looked up, a head is read whole."""
    models = load(target, drafter)
    batch, context = 3, 100
    spec = Engine(*models).spec
    assert spec.step_tokens == 5
    rows = batch * 5
    matrices = D * (N + 2) * H + N * H * D + V * D
    vectors = 2 * D + 2 * H
    verify, draft = floor.step_costs(spec, batch, context)
    assert verify.weight_bytes == pytest.approx(4 * (matrices + vectors + rows * D))
    assert verify.kv_bytes == pytest.approx(4 * 2 * batch * (context + 5) * H)
    assert verify.flops == pytest.approx(2 * rows * matrices + 4 * rows * (context + 5) * N * H)
    assert draft.weight_bytes == 4 * batch * 4 * V
    need = memory.footprint(spec, batch, 128, make_mesh(devices=jax.devices()[:1]))
    assert need.weights == 4 * (matrices + vectors + V * D + V * V)
    assert need.caches == 4 * batch * 2 * 128 * H + 4 * batch * (V + 1)


def test_an_embedding_that_is_the_head_too_is_read_whole():
    """Gemma 4's table is tied: both uses together read it once, whole."""
    config = GEMMA4_PRESETS["31b"]
    model_def = ModelDef(Gemma4, config, "bfloat16")
    size = sum(a.size for a in model_def.abstract_params().values())
    assert target_cost(model_def, 1, 1, 1).weight_bytes == 2 * size
    assert not model_def.declared()["embedder.table"].lookup


def test_conventions(target: Path, drafter: Path, tmp_path: Path):
    convert(drafter, tmp_path / "ours")
    for directory, origin, where in (
        (drafter, "default: on", "set recall_config.recall to false in {}/config.json"),
        (
            tmp_path / "ours",
            "manifest.json: config.recall",
            "set config.recall to false in {}/manifest.json",
        ),
    ):
        models = load(target, directory)
        recall, positions, suppressed = in_force(*models)
        assert (recall.value, recall.origin) == (True, origin)
        assert positions.shown == "none of the target's 512"
        assert positions.origin == "the method: no key changes it"
        assert suppressed.name == "suppressed ids"
        hypothesis = Hypothesis("", "", "", models[1].model_def, models[1].params)
        (other, turned), left_out = alternatives(*models, hypothesis, 100)
        assert other.model_def.config == dataclasses.replace(models[1].config, recall=False)
        assert other.fix == where.format(directory)
        assert turned.fix == f"transpose bigrams in the weights of {directory}"
        np.testing.assert_array_equal(turned.params["bigrams"], models[1].params["bigrams"].T)
        assert left_out == ["a long one: no row is longer than the window of 1000 tokens"]


def test_presets_are_benchmarked():
    """`bench --random-weights` knows the preset, its usual drafter, and how that is made."""
    models = ModelOptions(dtype="float32")
    pair = make_pair(models, Drafting(), "toy-s")
    assert pair.spec.drafter is not None
    assert pair.drafter_kind == "recall"
    assert pair.drafter_name == "recall for toy-s, random weights"
    assert pair.drafter_params is not None
    plain = pair.spec.drafter.random_params(1)["bigrams"]
    np.testing.assert_array_equal(pair.drafter_params["bigrams"], plain + 1)
    # A drafter that was not made for it is made up where that can be.
    alone = dataclasses.replace(models, drafter="none")
    assert make_pair(alone, Drafting(), "toy-s").spec.drafter is None
    with pytest.raises(ValueError, match="there is no MTP assistant for toy-s"):
        make_pair(dataclasses.replace(models, drafter="mtp"), Drafting(), "toy-s")
    with pytest.raises(ValueError, match=r"nothing is not known; expected one of .*31b.*toy-s"):
        make_pair(models, Drafting(), "nothing")


def test_the_registry():
    assert (
        registry.get_family("toy") is registry.family_of(ToyConfig(4, 4, 1, 4, 4)) is entries.TARGET
    )
    assert registry.recognise(TARGET) is entries.TARGET
    assert registry.recognise(DRAFTER) is entries.DRAFTER  # its architecture comes before its type
    assert registry.families("target")[0].name == "gemma4"
    with pytest.raises(ValueError, match="'nobody' is not known; expected one of gemma4, "):
        registry.get_family("nobody")
    with pytest.raises(ValueError, match="no family has configs of class int"):
        registry.family_of(3)
    with pytest.raises(ConfigError, match=r"model_type 'llama' .*gemma4_text.*toy.*RecallModel"):
        registry.recognise({"model_type": "llama"})
    with pytest.raises(ValueError, match=r"'toy' .* is registered already"):
        registry.register(entries.TARGET)

    @dataclasses.dataclass(frozen=True)
    class Other(ToyConfig):
        pass

    taken = dataclasses.replace(entries.TARGET, name="other", config=Other)
    with pytest.raises(ValueError, match=r"presets \['toy-s'\] of family 'other'"):
        registry.register(taken)
    drafter = RecallConfig(V, 4)
    with pytest.raises(ConfigError, match="the drafter has 64 tokens, the target 32"):
        drafter.check_fits(ToyConfig(32, 4, 1, 4, 4))


def test_a_converted_target_of_before_the_registry_loads(tmp_path: Path):
    """Such a manifest says the kind "target", when there was only Gemma 4."""
    hf_layout.write(tmp_path / "hf", TINY["31b"], hf_layout.target_shapes(TINY["31b"]))
    convert(tmp_path / "hf", tmp_path / "ours")
    file = tmp_path / "ours/manifest.json"
    manifest = json.loads(file.read_text())
    assert manifest["kind"] == "gemma4"
    file.write_text(json.dumps({**manifest, "kind": "target"}))
    before = load_target(str(tmp_path / "ours"), dtype="float32")
    direct = load_target(str(tmp_path / "hf"), dtype="float32")
    assert before.config == direct.config
    for name, array in direct.params.items():
        assert bool(jnp.array_equal(array, before.params[name])), name
    to_hf(tmp_path / "ours", tmp_path / "back")
    file.write_text(json.dumps({**manifest, "kind": "nobody"}))
    with pytest.raises(CheckpointError, match="is corrupt: family 'nobody' is not known"):
        load_target(str(tmp_path / "ours"), dtype="float32")


_ZLAB = hf_layout.DRAFTERS["qwen3-8b"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculators_model_type": "eagle3"}, r"EAGLE-3 drafter \(speculators_model_type eagle3"),
        ({"speculators_model_type": "hydra"}, r"hydra drafter"),
        ({"architectures": ["LiLiCorrDraftModel"]}, "LiLiCorr"),
        ({"architectures": ["Qwen3XPressModel"]}, "XPress"),
        ({"architectures": ["DSpineDraftModel"]}, "DSpine"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, "EAGLE-3"),
        ({"xpress_rank": 256}, "XPress"),
        ({"dspine_config": {}}, "DSpine"),
        ({"dflash_config": {"lilicorr_num_layers": 2}}, r"LiLiCorr .* .dflash_config\.lilicorr"),
        ({"dflash_config": {"projector_type": "domino"}}, "Domino"),
    ],
)
def test_drafters_of_other_methods_are_refused_by_their_name(change: dict[str, Any], message: str):
    """Some have the architecture or the model type of what runs; a tensor was named, or a key."""
    assert registry.recognise(_ZLAB).name == "dflash"
    assert registry.recognise(_ZLAB | {"projector_type": "dflash"}).name == "dflash"
    with pytest.raises(ConfigError, match=message):
        registry.recognise(_ZLAB | change)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"architectures": ["Qwen3DSparkModel"]}, "dspark"),
        ({"architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text"}, "dspark"),
        ({"markov_rank": 0}, "dspark"),
        ({"dflash_architecture_config": {"projector_type": "dspark"}}, "dspark"),
        ({"architectures": ["DFlash2DraftModel"]}, "dflash2"),
        ({"selector_rank": 256}, "dflash2"),
    ],
)
def test_drafters_of_known_methods_are_recognised_by_their_keys(change: dict[str, Any], name: str):
    assert registry.recognise(_ZLAB | change).name == name


def test_a_family_of_ones_own_may_be_of_such_a_method():
    assert registry.recognise(DRAFTER | {"markov_rank": 4}) is entries.DRAFTER
