"""DFlash2 in both layouts: files made from its formulas, and what we draft with them."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from checkpoints_convert.errors import CheckpointError
from jaxspec.configs.base import ConfigError
from jaxspec.configs.dflash2 import PRESETS, DFlash2Config
from jaxspec.drafters.dflash2 import DFlash2Drafter
from jaxspec.drafters.selector import Block
from jaxspec.drafters.tree import settle_num_draft_tokens
from jaxspec.models import xla
from jaxspec.options import Drafting, FieldError, Tree
from jaxspec.registry import recognise
from jaxspec.shapes import Array, Params
from jaxspec.weights.conversion import convert, to_hf
from jaxspec.weights.draft_head import model_def_with_head
from jaxspec.weights.loading import LoadedModel, load_drafter
from jaxspec.weights.model_def import ModelDef
from tests import cases, tiny
from tests.drafters import block_oracle, hf_drafter, test_speculators
from tests.drafters.block_oracle import Facts, Tensors
from tests.drafters.hf_drafter import Pair
from tests.drafters.test_speculators import changed

V, D, R, K, BLOCK, DRAFTS = tiny.VOCAB_SIZE, 48, 10, 6, 5, 4
SPECULATORS: dict[str, Any] = changed(
    test_speculators.CONFIG,
    architectures=["DFlash2DraftModel"],
    speculators_model_type="dflash2",
    speculators_config={
        "algorithm": "dflash2",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": DRAFTS}],
    },
    draft_vocab_size=V,
    target_hidden_size=None,
    sliding_window_non_causal=True,
    conv_kernel_size=2,
    conv_group_size=16,
    selector_rank=R,
    selector_top_k=K,
    layer__hidden_size=D,
)
ZLAB: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    **{k: v for k, v in SPECULATORS["transformer_layer_config"].items() if k != "model_type"},
    "block_size": BLOCK,
    "num_target_layers": 5,
    "dflash_config": {
        "target_layer_ids": [2, 0, 3],
        "mask_token_id": 4,
        "conv_kernel_size": 3,
        "conv_group_size": 8,
        "selector_rank": R,
        "selector_top_k": K,
        "output_multiplier": 0.6,
        "final_logit_softcapping": 9.0,
        "input_embedding_scale": 0.5,
        "scale_embeddings": False,
    },
}
FACTS = dataclasses.replace(test_speculators.FACTS, causal=(False, False), conv=16)
LAYOUTS: dict[str, tuple[dict[str, Any], Facts, float]] = {
    "speculators": (SPECULATORS, FACTS, 1.0),
    "z-lab": (
        ZLAB,
        dataclasses.replace(
            FACTS, from_anchor_window=False, conv=8, taps=3, softcap=9.0, embed_scale=0.5
        ),
        0.6,
    ),
}


def tensors_of(facts: Facts, *, tables: bool) -> dict[str, np.ndarray]:
    tensors = test_speculators.tensors_of(SPECULATORS)
    if not tables:
        tensors = {k: v for k, v in tensors.items() if not k.startswith(("embed_", "lm_head"))}
    shapes: dict[str, tuple[int, ...]] = {
        "candidate_selector.predecessor_codebook": (V, R),
        "candidate_selector.successor_codebook": (V, R),
        "candidate_selector.hidden_projection.weight": (R, D),
    }
    for i in range(2):
        for part in ("attention_conv", "mlp_conv"):
            shapes[f"layers.{i}.{part}.base_kernel"] = (2, facts.taps, D)
            size = 2 * facts.taps * D // facts.conv
            shapes[f"layers.{i}.{part}.kernel_projection.weight"] = (size, D)
    more = hf_drafter.random_tensors(shapes, seed=1)
    for name in more:
        if name.endswith("codebook"):
            more[name] = 2 * more[name]  # pairs matter as much as logits
    return tensors | more


def load(tmp_path: Path, layout: str) -> tuple[LoadedModel, dict[str, np.ndarray]]:
    config, facts, _ = LAYOUTS[layout]
    tensors = tensors_of(facts, tables=layout == "speculators")
    directory = hf_drafter.write(tmp_path / layout, config, tensors)
    return load_drafter(str(directory), dtype="float32"), tensors


def scores_after(w: Tensors, hidden: np.ndarray, logits: np.ndarray, before: int) -> np.ndarray:
    """Return the scores of all tokens in a slot, -inf for those that are no candidates."""
    scores = np.full(V, -np.inf)
    query = w["candidate_selector.hidden_projection.weight"] @ hidden
    for token in np.argsort(-logits, kind="stable")[:K]:
        pair = w["candidate_selector.predecessor_codebook"][before] * query
        scores[token] = logits[token] + pair @ w["candidate_selector.successor_codebook"][token]
    return scores


@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafts_equal_a_recomputation_from_the_tensors(tmp_path: Path, layout: str) -> None:
    """Token by token along the walk, and q by q over the target's whole vocabulary."""
    _, facts, multiplier = LAYOUTS[layout]
    drafter, tensors = load(tmp_path, layout)
    pair = Pair(drafter)
    w = {k: v.astype(np.float64) for k, v in tensors.items()}
    embedding = w.get("embed_tokens.weight", pair.table)
    head = w.get("lm_head.weight", pair.table) * multiplier
    greedy, drawn = pair.drafts(DRAFTS), pair.drafts(DRAFTS, 0.7)
    assert greedy.log_q is None
    changed_by_the_walk = 0
    for row, features in enumerate(pair.features):
        anchor = int(pair.anchors[row])
        hidden = block_oracle.hidden_of(facts, w, embedding, features, anchor, DRAFTS)
        logits = block_oracle.logits_of(facts, head, hidden)
        logits[:, list(hf_drafter.SUPPRESSED)] = -np.inf
        for draft in (greedy, drawn):
            before = anchor
            for slot in range(DRAFTS):
                token = int(draft.tokens[row, slot])
                scores = scores_after(w, hidden[slot], logits[slot], before)
                if draft is greedy:
                    assert token == scores.argmax()
                    changed_by_the_walk += token != logits[slot].argmax()
                else:
                    assert draft.log_q is not None
                    expected = block_oracle.log_softmax(scores / 0.7)
                    got = np.asarray(draft.log_q[row, slot])
                    np.testing.assert_allclose(got, expected, rtol=5e-4, atol=5e-4)
                    assert np.isfinite(expected[token])
                before = token
    assert changed_by_the_walk > 0


def test_a_tree_has_the_likeliest_children_of_every_node(tmp_path: Path) -> None:
    _, facts, multiplier = LAYOUTS["z-lab"]
    drafter, tensors = load(tmp_path, "z-lab")
    pair, shape, nodes = Pair(drafter), Tree(2, 3), 9
    draft = pair.drafts(nodes, tree=shape)
    assert draft.parents is not None
    w = {k: v.astype(np.float64) for k, v in tensors.items()}
    for row, features in enumerate(pair.features):
        anchor = int(pair.anchors[row])
        # Its block has as many slots as the tree has levels.
        hidden = block_oracle.hidden_of(facts, w, pair.table, features, anchor, shape.depth)
        logits = block_oracle.logits_of(facts, pair.table * multiplier, hidden)
        logits[:, list(hf_drafter.SUPPRESSED)] = -np.inf
        tokens, depth = [anchor], [0]
        for i in range(nodes):
            parent = int(draft.parents[row, i])
            slot = depth[parent]
            best = np.argsort(-scores_after(w, hidden[slot], logits[slot], tokens[parent]))[:2]
            tokens.append(int(draft.tokens[row, i]))
            depth.append(slot + 1)
            assert tokens[-1] in best
    Drafting(num_draft_tokens=K + 1, tree=Tree(K + 1, 2))
    with pytest.raises(FieldError, match=f"this drafter chooses among {K} tokens"):
        settle_num_draft_tokens(
            drafter.model_def, Drafting(num_draft_tokens=K + 1, tree=Tree(K + 1, 2))
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_and_back(tmp_path: Path, layout: str) -> None:
    direct, tensors = load(tmp_path, layout)
    assert convert(tmp_path / layout, tmp_path / "ours").kind == "dflash2"
    to_hf(tmp_path / "ours", tmp_path / "back")
    ours = load_drafter(str(tmp_path / "ours"), dtype="float32")
    assert ours.config == direct.config
    for name, array in direct.params.items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(ours.params[name]))
    back = load_file(tmp_path / "back/model.safetensors")
    assert set(back) == set(tensors)
    for name, array in back.items():
        np.testing.assert_array_equal(array, tensors[name])


@pytest.mark.parametrize("form", ["tree", *cases.slow("chain", "copied head")])
def test_output_is_that_of_plain_decoding(form: str, tmp_path: Path) -> None:
    """Chains, a tree and a copy of the head, with layers of the target's own."""
    c = cases.case("31b")
    config = changed(SPECULATORS, aux_hidden_state_layer_ids=[2, 1, 2])
    directory = hf_drafter.write(tmp_path / "hf", config, tensors_of(FACTS, tables=False))
    drafter = load_drafter(str(directory), dtype="float32")
    options: dict[str, Any] = {}
    if form == "tree":
        options = dict(tree=Tree(2, 3), num_draft_tokens=6)
    if form == "copied head":
        head = jnp.asarray(c.target.params["embedder.table"])
        model_def = model_def_with_head(drafter.model_def, c.target.model_def, "int8")
        params = {**drafter.params, "head": model_def.pack("head", head)}
        drafter = dataclasses.replace(drafter, model_def=model_def, params=params)
    engine = cases.engine_of(c.target, drafter, batch_size=4, cache_length=64, **options)
    done = cases.run(engine, [cases.request(p, cases.NEW_TOKENS) for p in c.prompts])
    assert [d.token_ids for d in done] == [c.continuation(row) for row in range(len(done))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"conv_kernel_size": 3}, r"base_kernel: shape \[2, 2, 48\], expected \[2, 3, 48\]"),
        ({"conv_group_size": 8}, r"kernel_projection\.weight: shape"),
        ({"conv_group_size": 7}, "hidden_size 48 is not a multiple of conv_group_size 7"),
        ({"selector_rank": R + 1}, r"predecessor_codebook: shape"),
        ({"selector_rank": 0}, "selector_rank is 0"),
        ({"selector_rank": "256"}, "selector_rank"),
        ({"selector_top_k": V + 1}, f"selector_top_k {V + 1} is more than the {V} tokens"),
        ({"output_multiplier": -1}, "output_multiplier"),
        ({"input_embedding_scale": 0}, "input_embedding_scale"),
        ({"conv_dilation": 2}, "conv_dilation = 2, which jaxspec does not know"),
        ({"markov_rank": 4}, "markov_rank = 4"),
        ({"lilicorr_num_layers": 2}, "LiLiCorr"),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bad_files_are_refused_by_name(
    tmp_path: Path, change: dict[str, Any], message: str, layout: str
) -> None:
    config, _, _ = LAYOUTS[layout]
    if layout == "z-lab":
        if "conv_kernel_size" in change or change == {"conv_group_size": 8}:
            change = {"conv_kernel_size": 2, "conv_group_size": 16}
            message = "base_kernel: shape|kernel_projection"
        config = config | {"dflash_config": config["dflash_config"] | change}
    else:
        config = changed(config, **change)
    tensors = tensors_of(LAYOUTS[layout][1], tables=layout == "speculators")
    directory = hf_drafter.write(tmp_path / "hf", config, tensors)
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        load_drafter(str(directory), dtype="float32")
    assert re.search(message, str(caught.value)), caught.value


def test_files_without_the_new_tensors_are_refused(tmp_path: Path) -> None:
    tensors = tensors_of(FACTS, tables=True)
    name = "candidate_selector.successor_codebook"
    del tensors[name]
    directory = hf_drafter.write(tmp_path / "hf", SPECULATORS, tensors)
    with pytest.raises(CheckpointError, match=f"{name}: missing"):
        load_drafter(str(directory), dtype="float32")


def test_it_is_recognised_by_its_keys() -> None:
    """People upload files again with another architecture, for programs that know one name."""
    assert recognise(ZLAB).name == recognise(SPECULATORS).name == "dflash2"
    assert recognise(ZLAB | {"architectures": ["DFlashDraftModel"]}).name == "dflash2"
    usual = {k: v for k, v in ZLAB["dflash_config"].items() if "conv" not in k}
    config = DFlash2Config.from_hf(ZLAB | {"dflash_config": usual})
    assert (config.conv_kernel_size, config.conv_group_size) == (2, 16)
    assert config.causal == (False, False)


def test_sizes_for_benchmarks_fit_their_targets() -> None:
    from jaxspec.registry import presets

    for name, config in PRESETS.items():
        config.check_fits(presets()[name])
        assert config.max_draft_tokens == 7


def test_the_best_of_parts_are_the_best_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many equal values, of which the first ones are taken; the form of GPUs, on a CPU."""

    def on_gpu(x: Array, *, cpu: Any, default: Any) -> Any:
        del cpu
        return default(x)

    monkeypatch.setattr(xla.lax, "platform_dependent", on_gpu)
    rng, shape = np.random.default_rng(0), (2, 3, 1024 * xla.TOP_PARTS)
    x = jnp.asarray(rng.integers(0, 40, shape) * rng.integers(0, 2, (2, 3, 1)), jnp.float32)
    for one, other in zip(xla.top_k(x, 16), jax.lax.top_k(x, 16), strict=True):
        np.testing.assert_array_equal(one, other)


def test_many_rows_are_searched_as_a_whole() -> None:
    """Of 56 rows the search in parts took 1.28 ms on an H200, and that of whole rows 0.54."""
    for rows, in_parts in ((xla.TOP_ROWS, True), (xla.TOP_ROWS + 1, False)):
        x = jax.ShapeDtypeStruct((rows, 1024 * xla.TOP_PARTS), jnp.float32)
        traced = str(jax.make_jaxpr(functools.partial(xla.top_k, k=16))(x))
        assert (f"{rows},{xla.TOP_PARTS},1024" in traced) == in_parts


def test_candidates_are_found_without_sorting_the_vocabulary() -> None:
    """A walk reads the candidates slot by slot; XLA joined those slices with `top_k`, and sorted all."""
    config = dataclasses.replace(
        PRESETS["26b-a4b"], vocab_size=4096, hidden_size=64, selector_rank=8, selector_top_k=16
    )
    made = ModelDef(DFlash2Drafter, config, "float32")

    def choose(params: Params, anchors: Array, hidden: Array, logits: Array) -> Array:
        block = Block(anchors, hidden, logits, None, config.vocab_size)
        return made.bind(params).selector.chain(block).tokens

    shapes = (2,), (2, 3, 64), (2, 3, 4096)
    dtypes = jnp.int32, jnp.float32, jnp.float32
    block = (jax.ShapeDtypeStruct(s, t) for s, t in zip(shapes, dtypes, strict=True))
    program = jax.jit(choose).lower(made.abstract_params(), *block).compile().as_text() or ""
    assert "TopK" in program
    assert " sort(" not in program
