"""DFlash in the container of the speculators library: files made from its formulas, and what we draft with them."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from checkpoints_convert.errors import CheckpointError
from jaxspec.commands.check import hypotheses
from jaxspec.configs.base import ConfigError
from jaxspec.options import FieldError, Tree
from jaxspec.registry import recognise
from jaxspec.weights.conversion import convert, to_hf
from jaxspec.weights.draft_head import check_borrows
from jaxspec.weights.loading import load_drafter
from jaxspec.weights.saving import save, save_hf
from tests import cases, tiny
from tests.drafters import block_oracle, hf_drafter
from tests.drafters.block_oracle import Facts
from tests.drafters.hf_drafter import Pair

V, VD, D, H, BLOCK = tiny.VOCAB_SIZE, 60, 24, 8, 5
WINDOW = 6
CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"": "eagle.EagleSpeculatorConfig"},
    "aux_hidden_state_layer_ids": [3, 1, 4],  # the last reads the output of layer 3, of 0 to 4
    "block_size": BLOCK,
    "draft_vocab_size": VD,
    "dtype": "float32",
    "has_no_defaults_at_init": False,
    "mask_token_id": 4,
    "sliding_window_non_causal": False,
    "speculators_config": {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": BLOCK - 1}],
        "verifier": {"architectures": ["Gemma4ForCausalLM"], "name_or_path": "google/gemma"},
    },
    "speculators_model_type": "dflash",
    "speculators_version": "0.6.0",
    "target_hidden_size": 48,
    "transformer_layer_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": H,
        "hidden_act": "silu",
        "hidden_size": D,
        "initializer_range": 0.02,
        "intermediate_size": 20,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 4096,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 6,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "sliding_window": WINDOW,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": True,
        "vocab_size": V,
    },
    "transformers_version": "5.0.0",
}
FACTS = Facts(
    heads=6,
    kv_heads=2,
    head_dim=H,
    windows=(WINDOW, None),
    causal=(True, False),
    mask=4,
    theta=1e4,
)


def changed(config: dict[str, Any], **values: Any) -> dict[str, Any]:
    """Return a config.json with other values; `layer__x` is x of the layers, None takes a key out."""
    config = copy.deepcopy(config)
    for name, value in values.items():
        inside, _, key = name.rpartition("__")
        part = config["transformer_layer_config"] if inside else config
        part.pop(key, None)
        if value is not None:
            part[key] = value
    return config


def tensors_of(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    layer, vd = config["transformer_layer_config"], config["draft_vocab_size"]
    d, f, h = layer["hidden_size"], layer["intermediate_size"], layer["head_dim"]
    q, kv = layer["num_attention_heads"] * h, layer["num_key_value_heads"] * h
    width = config.get("target_hidden_size", d) * len(config["aux_hidden_state_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (layer["vocab_size"], d),
        "fc.weight": (d, width),
        "hidden_norm.weight": (d,),
        "norm.weight": (d,),
        "lm_head.weight": (vd, d),
    }
    for i in range(layer["num_hidden_layers"]):
        shapes |= {
            f"layers.{i}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (d,),
                "post_attention_layernorm": (d,),
                "self_attn.q_proj": (q, d),
                "self_attn.k_proj": (kv, d),
                "self_attn.v_proj": (kv, d),
                "self_attn.o_proj": (d, q),
                "self_attn.q_norm": (h,),
                "self_attn.k_norm": (h,),
                "mlp.gate_proj": (f, d),
                "mlp.up_proj": (f, d),
                "mlp.down_proj": (d, f),
            }.items()
        }
    tensors = hf_drafter.random_tensors(shapes, seed)
    if vd < layer["vocab_size"]:
        ids = np.sort(np.random.default_rng(seed).permutation(layer["vocab_size"])[:vd])
        tensors["d2t"] = ids - np.arange(vd)
        tensors["t2d"] = np.isin(np.arange(layer["vocab_size"]), ids)
    return tensors


def ids_of(tensors: dict[str, np.ndarray]) -> np.ndarray:
    if "d2t" not in tensors:
        return np.arange(len(tensors["lm_head.weight"]))
    return tensors["d2t"] + np.arange(len(tensors["d2t"]))


VARIANTS: dict[str, tuple[dict[str, Any], Facts]] = {
    "as-released": (CONFIG, FACTS),
    "sampled-from-the-anchor": (
        changed(
            CONFIG,
            sample_from_anchor=True,
            speculators_config={"proposal_methods": [{"speculative_tokens": BLOCK}]},
        ),
        Facts(**{**vars(FACTS), "shifted": True}),
    ),
    "full-vocabulary": (changed(CONFIG, draft_vocab_size=V), FACTS),
    "no-layer-causal": (
        changed(CONFIG, sliding_window_non_causal=True),
        Facts(**{**vars(FACTS), "causal": (False, False)}),
    ),
    "all-causal": (
        changed(CONFIG, is_causal=True),
        Facts(**{**vars(FACTS), "causal": (True, True)}),
    ),
    "keys-on-top": (  # as some files have them, and rope by kind
        changed(
            CONFIG,
            layer_types=["full_attention", "sliding_attention"],
            sliding_window=4,
            layer__layer_types=None,
            layer__sliding_window=None,
            layer__rope_parameters={
                "sliding_attention": {"rope_theta": 5000.0, "rope_type": "default"},
                "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
            },
        ),
        Facts(**{**vars(FACTS), "windows": (None, 4), "causal": (False, True), "theta": 5000.0}),
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_drafts_equal_a_recomputation_from_the_tensors(tmp_path: Path, name: str) -> None:
    """Token by token, and q by q over the target's whole vocabulary."""
    config, facts = VARIANTS[name]
    tensors = tensors_of(config)
    directory = hf_drafter.write(tmp_path / "hf", config, tensors)
    drafter = load_drafter(str(directory), dtype="float32")
    assert drafter.config.feature_layers == (2, 0, 3)
    assert drafter.config.max_draft_tokens == BLOCK - (not facts.shifted)
    pair, drafts = Pair(drafter), drafter.config.max_draft_tokens
    exact = {k: v.astype(np.float64) for k, v in tensors.items()}
    ids = ids_of(tensors)
    greedy = np.asarray(pair.drafts(drafts).tokens)
    drawn = pair.drafts(drafts, 0.7)
    log_q = np.asarray(drawn.log_q)
    for row, features in enumerate(pair.features):
        anchor = int(pair.anchors[row])
        embedding = exact["embed_tokens.weight"]
        hidden = block_oracle.hidden_of(facts, exact, embedding, features, anchor, drafts)
        logits = np.full((drafts, V), -np.inf)
        logits[:, ids] = block_oracle.logits_of(facts, exact["lm_head.weight"], hidden)
        logits[:, list(hf_drafter.SUPPRESSED)] = -np.inf
        np.testing.assert_array_equal(greedy[row], logits.argmax(-1))
        expected = block_oracle.log_softmax(logits / 0.7)
        np.testing.assert_allclose(log_q[row], expected, rtol=2e-4, atol=2e-4)
        assert np.isfinite(expected[np.arange(drafts), np.asarray(drawn.tokens)[row]]).all()


def test_a_tree_has_the_likeliest_tokens_of_every_slot(tmp_path: Path) -> None:
    drafter = load_drafter(
        str(hf_drafter.write(tmp_path / "hf", CONFIG, tensors_of(CONFIG))), dtype="float32"
    )
    pair = Pair(drafter)
    tree = pair.drafts(6, tree=Tree(2, 3))
    log_q = np.asarray(pair.drafts(BLOCK - 1, 1.0).log_q)
    assert tree.parents is not None
    depth = np.zeros((len(pair.anchors), 7), int)
    for row in range(len(pair.anchors)):
        for i, parent in enumerate(np.asarray(tree.parents)[row]):
            depth[row, i + 1] = depth[row, parent] + 1
            best = np.argsort(-log_q[row, depth[row, parent]])[:2]
            assert int(tree.tokens[row, i]) in best


@pytest.mark.parametrize("name", ["as-released", "full-vocabulary"])
def test_there_and_back(tmp_path: Path, name: str) -> None:
    config, _ = VARIANTS[name]
    tensors = tensors_of(config)
    directory = hf_drafter.write(tmp_path / "hf", config, tensors)
    report = convert(directory, tmp_path / "ours")
    assert report.kind == "dflash"
    to_hf(tmp_path / "ours", tmp_path / "back")
    ours = load_drafter(str(tmp_path / "ours"), dtype="float32")
    direct = load_drafter(str(directory), dtype="float32")
    save(tmp_path / "saved", ours)
    save_hf(tmp_path / "saved-hf", direct)
    saved = load_drafter(str(tmp_path / "saved"), dtype="float32")
    again = load_drafter(str(tmp_path / "saved-hf"), dtype="float32")
    assert ours.config == direct.config == saved.config == again.config
    for name, array in direct.params.items():
        for other in (ours, saved, again):
            np.testing.assert_array_equal(np.asarray(array), np.asarray(other.params[name]))
    back = load_file(tmp_path / "back/model.safetensors")
    assert set(back) == set(tensors) - {"t2d"}
    for name, array in back.items():
        assert array.dtype == tensors[name].dtype
        np.testing.assert_array_equal(array, tensors[name])


def test_tables_that_files_leave_out_are_the_targets(tmp_path: Path) -> None:
    """Newer files have no embedding, and no head where it is that of all tokens."""
    config = changed(CONFIG, draft_vocab_size=V, target_hidden_size=None, layer__hidden_size=48)
    tensors = tensors_of(config)
    bare = {k: v for k, v in tensors.items() if k not in ("embed_tokens.weight", "lm_head.weight")}
    drafter = load_drafter(str(hf_drafter.write(tmp_path / "hf", config, bare)), dtype="float32")
    assert not drafter.config.own_embedding
    assert not drafter.config.own_head
    pair = Pair(drafter)
    exact = {k: v.astype(np.float64) for k, v in bare.items()}
    tokens = np.asarray(pair.drafts(BLOCK - 1).tokens)
    for row, features in enumerate(pair.features):
        anchor = int(pair.anchors[row])
        hidden = block_oracle.hidden_of(FACTS, exact, pair.table, features, anchor, BLOCK - 1)
        logits = hidden @ pair.table.T
        logits[:, list(hf_drafter.SUPPRESSED)] = -np.inf
        np.testing.assert_array_equal(tokens[row], logits.argmax(-1))


def test_an_embedding_that_is_the_targets_is_shared(tmp_path: Path) -> None:
    """Only to the bit: another one is kept. What is shared drafts the same."""
    pytest.importorskip("torch", reason="a target is written with transformers, which needs torch")
    model = tiny.save("31b", tmp_path / "target")
    config = changed(CONFIG, target_hidden_size=None, layer__hidden_size=48)
    tensors = tensors_of(config)
    hf_drafter.write(tmp_path / "other", config, tensors)
    report = convert(tmp_path / "other", tmp_path / "kept", target=tmp_path / "target")
    assert report.shared is False
    assert load_drafter(str(tmp_path / "kept"), dtype="float32").config.own_embedding
    tensors["embed_tokens.weight"] = model.state_dict()["model.embed_tokens.weight"].numpy()
    hf_drafter.write(tmp_path / "same", config, tensors)
    report = convert(tmp_path / "same", tmp_path / "shared", target=tmp_path / "target")
    assert report.shared
    assert list(report.skipped)[1].startswith("equal to the target's embedding to the bit")
    shared = load_drafter(str(tmp_path / "shared"), dtype="float32")
    assert not shared.config.own_embedding
    assert "embedding" not in shared.params
    whole, part = Pair(load_drafter(str(tmp_path / "same"), dtype="float32")), Pair(shared)
    table = whole.drafter.params["embedding"]
    for pair in (whole, part):
        pair.target_params = {**pair.target_params, "embedder.table": table}
    np.testing.assert_array_equal(whole.drafts(4).tokens, part.drafts(4).tokens)
    to_hf(tmp_path / "shared", tmp_path / "back")  # as newer files are, without an embedding
    again = load_drafter(str(tmp_path / "back"), dtype="float32")
    assert again.config == shared.config


@pytest.mark.slow  # test_dspark has drafters of this container by default
def test_output_is_that_of_plain_decoding(tmp_path: Path) -> None:
    c = cases.case("31b")
    for name, count in (("as-released", 4), ("sampled-from-the-anchor", 5)):
        config = changed(VARIANTS[name][0], aux_hidden_state_layer_ids=[2, 1, 2])
        directory = hf_drafter.write(tmp_path / name, config, tensors_of(config))
        drafter = load_drafter(str(directory), dtype="float32")
        engine = cases.engine_of(c.target, drafter, batch_size=4, cache_length=64)
        assert drafter.config.max_draft_tokens == count
        done = cases.run(engine, [cases.request(p, cases.NEW_TOKENS) for p in c.prompts])
        assert [d.token_ids for d in done] == [c.continuation(row) for row in range(len(done))]


def test_check_tries_the_conventions_of_the_container(tmp_path: Path) -> None:
    target = cases.case("31b").target
    config = changed(CONFIG, aux_hidden_state_layer_ids=[2, 1, 2])
    directory = hf_drafter.write(tmp_path / "hf", config, tensors_of(config))
    drafter = load_drafter(str(directory), dtype="float32")
    found = {c.name: c for c in hypotheses.in_force(target, drafter)}
    assert found["container"].shown == "speculators"
    assert found["feature layers"].origin == "config.json: aux_hidden_state_layer_ids"
    assert found["slot of the anchor"].shown == "predicts nothing"
    assert found["head"].shown == f"its own, of {VD} of {V} tokens"
    first = hypotheses.Hypothesis("in force", "", "", drafter.model_def, drafter.params)
    tried, _ = hypotheses.alternatives(target, drafter, first, 100)
    fixes = {h.name: h.fix for h in tried}
    where = f"in {directory / 'config.json'}"
    assert fixes["drafts from the anchor's slot"] == f"set sample_from_anchor to true {where}"
    assert "embeddings scaled" not in fixes
    order = fixes["feature layers increasing"]
    assert order == f"set aux_hidden_state_layer_ids to [1, 2, 2] {where}"
    # The target has three layers, and outputs of the last are no features.
    assert "feature layers one higher" not in fixes


def test_a_head_of_its_own_is_not_copied(tmp_path: Path) -> None:
    directory = hf_drafter.write(tmp_path / "hf", CONFIG, tensors_of(CONFIG))
    drafter = load_drafter(str(directory), dtype="float32", quantize="int8")
    assert dict(drafter.model_def.formats)["head"] == "int8"
    with pytest.raises(FieldError, match="borrow the target's head"):
        check_borrows(drafter.model_def, "int8")


def refused(tmp_path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> str:
    directory = hf_drafter.write(tmp_path / "hf", config, tensors)
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        load_drafter(str(directory), dtype="float32").config.check_fits(tiny.config("31b"))
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transformer_layer_config": None}, "no transformer_layer_config"),
        ({"aux_hidden_state_layer_ids": None}, "no aux_hidden_state_layer_ids"),
        ({"aux_hidden_state_layer_ids": [0, 1, 2]}, "0 is the embedding"),
        ({"aux_hidden_state_layer_ids": [5, 1, 2]}, r"feature layers \[4\]"),
        ({"aux_hidden_state_layer_ids": 3}, "aux_hidden_state_layer_ids is 3; it must be a list"),
        ({"block_size": None}, "no block_size"),
        ({"block_size": 1}, "block_size"),
        ({"mask_token_id": None}, "no mask_token_id"),
        ({"mask_token_id": V}, "mask_token_id"),
        ({"draft_vocab_size": None}, "draft_vocab_size 32000"),
        ({"draft_vocab_size": V + 1}, "draft_vocab_size"),
        ({"draft_vocab_size": VD - 1}, r"lm_head\.weight: shape"),
        ({"target_hidden_size": 40}, r"fc\.weight: shape"),
        ({"projector_type": "domino"}, "Domino"),
        ({"projector_type": "spline"}, "projector_type"),
        ({"shift_label": True}, "shift_label"),
        ({"sliding_window_non_causal": 1}, "sliding_window_non_causal"),
        ({"is_causal": "yes"}, "is_causal"),
        ({"sample_from_anchor": "no"}, "sample_from_anchor"),
        ({"speculators_model_type": "eagle3"}, "EAGLE-3 drafter .speculators_model_type eagle3"),
        ({"speculators_config": {"algorithm": "dspark"}}, "algorithm = 'dspark'"),
        (
            {"speculators_config": {"proposal_methods": [{"speculative_tokens": BLOCK}]}},
            "set sample_from_anchor to true if it was trained so",
        ),
        ({"speculators_config": {"proposal_methods": [3]}}, "proposal_methods must hold objects"),
        ({"output_multiplier": 0.2}, "output_multiplier"),
        ({"a_new_key": 3}, "a_new_key"),
        ({"layer__a_new_key": 3}, r"a_new_key .* \(in its transformer_layer_config\)"),
        ({"layer__model_type": "llama"}, "model_type = 'llama'"),
        ({"layer__hidden_act": "gelu"}, "hidden_act"),
        ({"layer__attention_bias": True}, "attention_bias"),
        ({"layer__num_hidden_layers": 3}, "layer_types lists 2 layers"),
        ({"layer__vocab_size": V - 1}, "vocab_size|embed_tokens"),
        ({"layer__sliding_window": None}, "no sliding_window"),
        ({"sliding_window": 7}, "which are one thing"),
        ({"layer__rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"layer__rope_parameters": None}, "rope_theta"),
        ({"layer__head_dim": 12}, r"self_attn\.q_proj\.weight: shape"),
    ],
)
def test_bad_files_are_refused_by_name(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    text = refused(tmp_path, changed(CONFIG, **change), tensors_of(CONFIG))
    assert re.search(message, text), text
    assert str(tmp_path) in text or "does not fit the target" in text


@pytest.mark.parametrize(
    ("d2t", "message"),
    [
        (np.zeros(VD, np.int64), None),
        (np.arange(VD), None),
        (-np.arange(VD), "makes 59 ids twice"),
        (np.full(VD, V - VD + 1), f"makes ids from {V - VD + 1} to {V}"),
        (np.full(VD, -1), "makes ids from -1 to"),
        (np.zeros(VD, np.float32), "d2t: dtype F32"),
        (np.zeros(VD + 1, np.int64), "d2t: shape"),
    ],
)
def test_a_vocabulary_that_is_none_is_refused(
    tmp_path: Path, d2t: np.ndarray, message: str | None
) -> None:
    tensors = tensors_of(CONFIG) | {"d2t": d2t}
    if message is not None:
        assert message in refused(tmp_path, CONFIG, tensors)
        return
    directory = hf_drafter.write(tmp_path / "hf", CONFIG, tensors)
    drafter = load_drafter(str(directory), dtype="float32")
    np.testing.assert_array_equal(drafter.params["ids"], d2t + np.arange(VD))


@pytest.mark.parametrize(
    "missing", ["d2t", "lm_head.weight", "fc.weight", "layers.1.mlp.up_proj.weight"]
)
def test_tensors_that_are_missing_are_named(tmp_path: Path, missing: str) -> None:
    tensors = tensors_of(CONFIG)
    del tensors[missing]
    assert f"{missing}: missing" in refused(tmp_path, CONFIG, tensors)


def test_a_drafter_of_another_target_is_refused(tmp_path: Path) -> None:
    config = changed(CONFIG, target_hidden_size=40)
    text = refused(tmp_path, config, tensors_of(config))
    assert "hidden_size: drafter 40, target 48" in text


def test_every_name_of_the_container_is_recognised() -> None:
    for word in ("DFlashDraftModel", "DFlashSpeculator"):
        assert recognise(changed(CONFIG, architectures=[word])).name == "dflash"
    assert recognise(json.loads(json.dumps(changed(CONFIG, architectures=None)))).name == "dflash"
