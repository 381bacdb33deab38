"""DSpark in its layouts: files made from its formulas, and what we draft with them."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from checkpoints_convert.errors import CheckpointError
from jaxspec.commands.check import hypotheses
from jaxspec.configs.base import ConfigError
from jaxspec.configs.dspark import PRESETS, DSparkConfig
from jaxspec.drafters.selector import Block
from jaxspec.options import Tree
from jaxspec.registry import presets, recognise
from jaxspec.weights.conversion import convert, to_hf
from jaxspec.weights.loading import LoadedModel, load_drafter
from tests import cases, tiny
from tests.drafters import block_oracle, hf_drafter, test_speculators
from tests.drafters.block_oracle import Facts, Tensors
from tests.drafters.hf_drafter import Pair
from tests.drafters.test_speculators import BLOCK, VD, changed

V, D, R = tiny.VOCAB_SIZE, 48, 10
SPECULATORS: dict[str, Any] = changed(
    test_speculators.CONFIG,
    architectures=["DSparkDraftModel"],
    speculators_model_type="dspark",
    speculators_config={"algorithm": "dspark"},
    target_hidden_size=None,
    markov_rank=R,
    markov_head_type="vanilla",
    enable_confidence_head=True,
    confidence_head_with_markov=True,
    num_anchors=256,
    ce_loss_alpha=0.1,
    layer__hidden_size=D,
)
LAYER = {k: v for k, v in SPECULATORS["transformer_layer_config"].items() if k != "model_type"}
SPECFORGE: dict[str, Any] = {
    "architectures": ["DSparkDraftModel"],
    "model_type": "dspark",
    **LAYER,
    "block_size": BLOCK,
    "num_target_layers": 5,
    "markov_rank": R,
    "markov_head_type": "rnn",
    "enable_confidence_head": True,
    "confidence_head_with_markov": False,
    "dflash_config": {
        "projector_type": "dspark",
        "target_layer_ids": [2, 0, 3],
        "mask_token_id": 4,
        "scale_embeddings": False,
    },
}
MODELOPT: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    **LAYER,
    "block_size": BLOCK,
    "num_target_layers": 5,
    "dflash_architecture_config": {
        "projector_type": "dspark",
        "target_layer_ids": [2, 0, 3],
        "mask_token_id": 4,
        "scale_embeddings": False,
        "markov_rank": R,
        "use_confidence_head": True,
        "confidence_head_with_markov": True,
        "shift_label": False,
    },
}
DEEPSPEC: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    **LAYER,
    "layer_types": ["full_attention"] * 2,
    "sliding_window": None,
    "use_sliding_window": False,
    "block_size": BLOCK,
    "mask_token_id": 4,
    "num_anchors": 512,
    "num_target_layers": 5,
    "target_layer_ids": [2, 0, 3],
    "markov_rank": R,
    "markov_head_type": "gated",
    "enable_confidence_head": False,
}
GEMMA: dict[str, Any] = {
    **tiny.hf_config("12b"),
    "architectures": ["Gemma4DSparkModel"],
    "layer_types": ["full_attention"] * 2,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
    "block_size": BLOCK,
    "mask_token_id": 4,
    "num_anchors": 512,
    "num_target_layers": 5,
    "target_layer_ids": [2, 0, 3],
    "target_model_type": "gemma4_unified",
    "target_text_model_type": "gemma4_unified_text",
    "markov_rank": R,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "final_logit_softcapping": 9.0,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.5,
            "rope_theta": 5e5,
        }
    },
}
FULL = dataclasses.replace(
    test_speculators.FACTS, windows=(None, None), causal=(False, False), shifted=True
)
_ZLAB = dataclasses.replace(
    test_speculators.FACTS, causal=(False, False), from_anchor_window=False, shifted=True
)
GEMMA_FACTS = dataclasses.replace(
    FULL, heads=4, kv_heads=1, head_dim=32, theta=5e5, embed_scale=D**0.5, softcap=9.0
)


@dataclass(frozen=True)
class Layout:
    """A config.json, what it says, and which tensors go with it."""

    config: dict[str, Any]
    facts: Facts
    head: str = "vanilla"
    tables: bool = True
    confidence: int = 0  # inputs
    bare: bool = False
    vocabulary: int = V


LAYOUTS = {
    "speculators": Layout(SPECULATORS, test_speculators.FACTS, confidence=D + R, vocabulary=VD),
    "speculators-gated-from-the-anchor": Layout(
        changed(SPECULATORS, sample_from_anchor=True, markov_head_type="gated"),
        dataclasses.replace(test_speculators.FACTS, shifted=True),
        head="gated",
        confidence=D + R,
        vocabulary=VD,
    ),
    "specforge-rnn": Layout(SPECFORGE, _ZLAB, head="rnn", tables=False, confidence=D),
    "modelopt": Layout(
        MODELOPT,
        dataclasses.replace(_ZLAB, shifted=False),
        tables=False,
        confidence=D + R,
        bare=True,
    ),
    "deepspec": Layout(DEEPSPEC, FULL, head="gated"),
    "deepspec-dflash": Layout(DEEPSPEC | {"markov_rank": 0}, FULL, head="none"),
    "deepspec-gemma": Layout(GEMMA, GEMMA_FACTS, confidence=D + R),
    "deepspec-gemma-with-values": Layout(
        GEMMA | {"attention_k_eq_v": False, "num_key_value_heads": 2},
        dataclasses.replace(GEMMA_FACTS, kv_heads=2),
        confidence=D + R,
    ),
}


def tensors_of(layout: Layout) -> dict[str, np.ndarray]:
    vd, f = layout.vocabulary, layout.facts
    source = changed(SPECULATORS, draft_vocab_size=vd)
    tensors = test_speculators.tensors_of(source)
    if not layout.tables:
        tensors = {k: v for k, v in tensors.items() if not k.startswith(("embed_", "lm_head"))}
    shapes: dict[str, tuple[int, ...]] = {}
    if layout.config["architectures"] == ["Gemma4DSparkModel"]:
        tensors = {k: v for k, v in tensors.items() if not k.startswith("layers.")}
        q, kv, mlp = f.heads * f.head_dim, f.kv_heads * f.head_dim, 64
        for i in range(2):
            norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
            shapes |= {f"layers.{i}.{n}_layernorm.weight": (D,) for n in norms}
            shapes |= {
                f"layers.{i}.layer_scalar": (1,),
                f"layers.{i}.self_attn.q_proj.weight": (q, D),
                f"layers.{i}.self_attn.k_proj.weight": (kv, D),
                f"layers.{i}.self_attn.o_proj.weight": (D, q),
                f"layers.{i}.self_attn.q_norm.weight": (f.head_dim,),
                f"layers.{i}.self_attn.k_norm.weight": (f.head_dim,),
                f"layers.{i}.mlp.gate_proj.weight": (mlp, D),
                f"layers.{i}.mlp.up_proj.weight": (mlp, D),
                f"layers.{i}.mlp.down_proj.weight": (D, mlp),
            }
            if not layout.config["attention_k_eq_v"]:
                shapes[f"layers.{i}.self_attn.v_proj.weight"] = (kv, D)
    markov = "" if layout.bare else "markov_head."
    if layout.head != "none":
        shapes |= {f"{markov}markov_w1.weight": (V, R), f"{markov}markov_w2.weight": (vd, R)}
    if layout.head == "gated":
        shapes |= {"markov_head.gate_proj.weight": (R, D + R), "markov_head.gate_proj.bias": (R,)}
    if layout.head == "rnn":
        shapes |= {"markov_head.joint_proj.weight": (3 * R, 2 * R + D)}
        shapes |= {"markov_head.joint_proj.bias": (3 * R,)}
    if layout.confidence:
        name = "confidence_proj" if layout.bare else "confidence_head.proj"
        shapes |= {f"{name}.weight": (1, layout.confidence), f"{name}.bias": (1,)}
    more = hf_drafter.random_tensors(shapes, seed=1)
    for name in more:
        if "markov_w" in name:
            more[name] = 2.5 * more[name]  # the token before matters as much as the slot
    return tensors | more


def load(tmp_path: Path, name: str) -> tuple[LoadedModel, dict[str, np.ndarray]]:
    tensors = tensors_of(LAYOUTS[name])
    directory = hf_drafter.write(tmp_path / name, LAYOUTS[name].config, tensors)
    return load_drafter(str(directory), dtype="float32"), tensors


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


class Walk:
    """The head by the token before, from one slot to the next."""

    def __init__(self, layout: Layout, w: Tensors):
        self.head, self.w = layout.head, w
        self.prefix = "" if layout.bare else "markov_head."
        self.s = np.zeros(R)

    def vector(self, before: int) -> np.ndarray:
        return self.w[f"{self.prefix}markov_w1.weight"][before]

    def bias(self, hidden: np.ndarray, before: int) -> np.ndarray | float:
        if self.head == "none":
            return 0.0
        e = self.vector(before)
        if self.head == "gated":
            z = np.concatenate([hidden, e])
            gate = self.w["markov_head.gate_proj.weight"] @ z + self.w["markov_head.gate_proj.bias"]
            e = sigmoid(gate) * e
        if self.head == "rnn":
            z = np.concatenate([self.s, e, hidden])
            joint = self.w["markov_head.joint_proj.weight"] @ z
            g, c, o = np.split(joint + self.w["markov_head.joint_proj.bias"], 3)
            self.s = sigmoid(g) * self.s + (1 - sigmoid(g)) * np.tanh(c)
            e = np.tanh(o)
        return self.w[f"{self.prefix}markov_w2.weight"] @ e


def base_of(
    layout: Layout, w: Tensors, pair: Pair, row: int, drafts: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the hidden states and the logits before the head by the token before."""
    f, features, anchor = layout.facts, pair.features[row], int(pair.anchors[row])
    if layout.config["architectures"] == ["Gemma4DSparkModel"]:
        k_eq_v = layout.config["attention_k_eq_v"]
        options: dict[str, Any] = dict(rotary=0.5, values_are_keys=k_eq_v)
        hidden = block_oracle.gemma_hidden_of(f, w, features, anchor, drafts, **options)
    else:
        embedding = w.get("embed_tokens.weight", pair.table)
        hidden = block_oracle.hidden_of(f, w, embedding, features, anchor, drafts)
    return hidden, block_oracle.logits_of(f, w.get("lm_head.weight", pair.table), hidden)


@pytest.mark.parametrize("name", LAYOUTS)
def test_drafts_equal_a_recomputation_from_the_tensors(tmp_path: Path, name: str) -> None:
    """Token by token along the walk, q by q over the target's whole vocabulary, and confidences."""
    layout = LAYOUTS[name]
    drafter, tensors = load(tmp_path, name)
    pair, drafts = Pair(drafter), drafter.config.max_draft_tokens
    assert drafts == BLOCK - (not layout.facts.shifted)
    w = {k: v.astype(np.float64) for k, v in tensors.items()}
    ids = test_speculators.ids_of(tensors) if "d2t" in tensors else np.arange(V)
    greedy, drawn = pair.drafts(drafts), pair.drafts(drafts, 0.7)
    changed_by_the_walk = 0
    for row in range(len(pair.anchors)):
        hidden, base = base_of(layout, w, pair, row, drafts)
        for draft in (greedy, drawn):
            before, walk = int(pair.anchors[row]), Walk(layout, w)
            for slot in range(drafts):
                token = int(draft.tokens[row, slot])
                scores = np.full(V, -np.inf)
                scores[ids] = base[slot] + walk.bias(hidden[slot], before)
                scores[list(hf_drafter.SUPPRESSED)] = -np.inf
                if draft is greedy:
                    assert token == scores.argmax()
                    changed_by_the_walk += token != ids[base[slot].argmax()]
                else:
                    assert draft.log_q is not None
                    expected = block_oracle.log_softmax(scores / 0.7)
                    got = np.asarray(draft.log_q[row, slot])
                    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)
                before = token
    assert (changed_by_the_walk > 0) == (layout.head != "none")


@pytest.mark.parametrize("name", ["speculators", "specforge-rnn", "modelopt", "deepspec-gemma"])
def test_confidences_equal_a_recomputation(tmp_path: Path, name: str) -> None:
    """And none depends on the token whose acceptance it predicts."""
    layout = LAYOUTS[name]
    drafter, tensors = load(tmp_path, name)
    selector = drafter.model_def.bind(drafter.params).selector
    rng = np.random.default_rng(0)
    tokens, hidden = rng.integers(0, V, (3, 4)), rng.normal(size=(3, 4, D)).astype(np.float32)
    anchors = rng.integers(0, V, 3)
    zeros = jnp.zeros((3, 4, V))
    block = Block(jnp.asarray(anchors, jnp.int32), jnp.asarray(hidden), zeros, None, V)
    found = np.asarray(jax.jit(selector.confidences)(block, jnp.asarray(tokens, jnp.int32)))
    part = "confidence_proj" if layout.bare else "confidence_head.proj"
    weight, bias = tensors[f"{part}.weight"][0], tensors[f"{part}.bias"]
    walk = Walk(layout, tensors)
    for row in range(3):
        for slot in range(4):
            x = hidden[row, slot]
            if layout.confidence > D:
                before = int(anchors[row] if slot == 0 else tokens[row, slot - 1])
                x = np.concatenate([x, walk.vector(before)])
            np.testing.assert_allclose(found[row, slot], sigmoid(weight @ x + bias)[0], rtol=1e-4)
    other = tokens.copy()
    other[:, 2] = (other[:, 2] + 1) % V
    again = np.asarray(selector.confidences(block, jnp.asarray(other, jnp.int32)))
    np.testing.assert_array_equal(again[:, :3], found[:, :3])


def test_a_tree_of_a_head_with_memory(tmp_path: Path) -> None:
    """What rnn remembers goes from a node to its own children."""
    layout = LAYOUTS["specforge-rnn"]
    drafter, tensors = load(tmp_path, "specforge-rnn")
    pair, shape, nodes = Pair(drafter), Tree(2, 3), 9
    draft = pair.drafts(nodes, tree=shape)
    assert draft.parents is not None
    w = {k: v.astype(np.float64) for k, v in tensors.items()}
    for row in range(len(pair.anchors)):
        hidden, base = base_of(layout, w, pair, row, shape.depth)
        paths: list[list[int]] = [[int(pair.anchors[row])]]
        for i in range(nodes):
            path, walk = paths[int(draft.parents[row, i])], Walk(layout, w)
            scores = np.zeros(V)
            for slot, before in enumerate(path):
                scores = base[slot] + walk.bias(hidden[slot], before)
            scores[list(hf_drafter.SUPPRESSED)] = -np.inf
            token = int(draft.tokens[row, i])
            assert token in np.argsort(-scores)[:2]
            paths.append([*path, token])


@pytest.mark.parametrize("name", LAYOUTS)
def test_there_and_back(tmp_path: Path, name: str) -> None:
    direct, tensors = load(tmp_path, name)
    assert convert(tmp_path / name, tmp_path / "ours").kind == "dspark"
    to_hf(tmp_path / "ours", tmp_path / "back")
    ours = load_drafter(str(tmp_path / "ours"), dtype="float32")
    assert ours.config == direct.config
    for param, array in direct.params.items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(ours.params[param]))
    back = load_file(tmp_path / "back/model.safetensors")
    assert set(back) == set(tensors) - {"t2d"}
    for tensor, array in back.items():
        np.testing.assert_array_equal(array, tensors[tensor])


@pytest.mark.parametrize(
    "name", ["speculators-gated-from-the-anchor", *cases.slow("deepspec-gemma")]
)
def test_output_is_that_of_plain_decoding(tmp_path: Path, name: str) -> None:
    c, layout = cases.case("31b"), LAYOUTS[name]
    config = layout.config
    if "aux_hidden_state_layer_ids" in config:
        config = config | {"aux_hidden_state_layer_ids": [2, 1, 2]}
    else:
        config = config | {"target_layer_ids": [1, 0, 1], "num_target_layers": 3}
    directory = hf_drafter.write(tmp_path / name, config, tensors_of(layout))
    drafter = load_drafter(str(directory), dtype="float32")
    engine = cases.engine_of(c.target, drafter, batch_size=4, cache_length=64)
    done = cases.run(engine, [cases.request(p, cases.NEW_TOKENS) for p in c.prompts])
    assert [d.token_ids for d in done] == [c.continuation(row) for row in range(len(done))]


@pytest.mark.parametrize("name", LAYOUTS)
def test_check_knows_the_layout(tmp_path: Path, name: str) -> None:
    target = cases.case("31b").target
    drafter, _ = load(tmp_path, name)
    found = {c.name: c.shown for c in hypotheses.in_force(target, drafter)}
    container = {"speculators": "speculators", "deepspec": "DeepSpec", "modelopt": "ModelOpt"}
    assert found["container"] == container.get(name.split("-")[0], "z-lab")
    assert found["head by the token before"] == (
        "none" if LAYOUTS[name].head == "none" else f"{LAYOUTS[name].head}, rank {R}"
    )
    first = hypotheses.Hypothesis("in force", "", "", drafter.model_def, drafter.params)
    tried = {h.name: h for h in hypotheses.alternatives(target, drafter, first, 100)[0]}
    shifted = LAYOUTS[name].facts.shifted
    assert (
        "no draft from the anchor's slot" if shifted else "drafts from the anchor's slot"
    ) in tried
    same = LAYOUTS[name].vocabulary == V and LAYOUTS[name].head != "none"
    assert ("tables of the Markov head exchanged" in tried) == same


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("speculators", {"markov_rank": R + 1}, r"markov_w1\.weight: shape"),
        ("speculators", {"markov_rank": 0}, "markov_rank is 0: there is no such head"),
        ("speculators", {"markov_rank": -1}, "markov_rank"),
        ("speculators", {"markov_head_type": "fir"}, "markov_head_type is 'fir'"),
        ("speculators", {"markov_head_type": "rnn"}, r"joint_proj\.weight: missing"),
        (
            "speculators",
            {"confidence_head_with_markov": False},
            r"confidence_head\.proj\.weight: s",
        ),
        (
            "speculators",
            {"enable_confidence_head": False},
            r"confidence_head\.proj\.bias: not known",
        ),
        ("speculators", {"draft_vocab_size": V}, r"lm_head\.weight: shape|d2t: not known"),
        ("specforge-rnn", {"dspark_backbone_conv_enabled": True}, "dspark_backbone_conv_enabled"),
        ("specforge-rnn", {"use_swa": True}, "use_swa"),
        ("specforge-rnn", {"markov_window": 3}, "markov_window = 3"),
        ("specforge-rnn", {"projector_type": "domino"}, "Domino"),
        ("deepspec", {"target_layer_ids": [-1, 0, 3]}, "target_layer_ids"),
        ("deepspec", {"shift_label": False, "sample_from_anchor": True}, "which are one thing"),
        ("deepspec", {"hidden_act": "gelu"}, "hidden_act"),
        ("deepspec-gemma", {"layer_types": ["sliding_attention", "full_attention"]}, "sliding"),
        ("deepspec-gemma", {"hidden_size_per_layer_input": 8}, "per_layer_input_size = 8"),
        ("deepspec-gemma", {"num_kv_shared_layers": 1}, "num_kv_shared_layers = 1"),
        ("deepspec-gemma", {"target_layer_ids": None}, "target_layer_ids"),
        ("deepspec-gemma", {"a_new_key": 1}, "a_new_key"),
        ("deepspec-gemma", {"global_head_dim": 16}, r"q_proj\.weight: shape"),
        ("deepspec-gemma", {"attention_k_eq_v": False}, r"v_proj\.weight: missing"),
    ],
)
def test_bad_files_are_refused_by_name(
    tmp_path: Path, name: str, change: dict[str, Any], message: str
) -> None:
    config = {k: v for k, v in (LAYOUTS[name].config | change).items() if v is not None}
    directory = hf_drafter.write(tmp_path / "hf", config, tensors_of(LAYOUTS[name]))
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        load_drafter(str(directory), dtype="float32")
    assert re.search(message, str(caught.value)), caught.value


def test_it_is_recognised_by_its_keys() -> None:
    """The name DSparkDraftModel is three layouts, and people change it for programs that know one."""
    for layout in LAYOUTS.values():
        assert recognise(layout.config).name == "dspark"
        if layout.facts is not GEMMA_FACTS and layout.config["architectures"] != [
            "Gemma4DSparkModel"
        ]:
            other = layout.config | {"architectures": ["DFlashDraftModel"]}
            assert DSparkConfig.from_hf(other) == DSparkConfig.from_hf(layout.config)


def test_sizes_for_benchmarks_fit_their_targets() -> None:
    for name, config in PRESETS.items():
        config.check_fits(presets()[name])
        assert config.max_draft_tokens == 7
