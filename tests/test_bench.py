"""The benchmark's arithmetic against published numbers, and its report from a run on the CPU. Nothing is timed here."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from jaxspec import bench, memory
from jaxspec.bench import Ceiling, Pair, StepCost
from jaxspec.config import MTP_PRESETS, TARGET_PRESETS, DFlashConfig, MTPConfig
from jaxspec.decode import DecodeSpec
from jaxspec.drafters.base import Tree
from jaxspec.drafters.dflash import DFlashDrafter
from jaxspec.drafters.mtp import MTPDrafter
from jaxspec.models.gemma4 import Gemma4
from jaxspec.params import Graph
from jaxspec.sharding import make_mesh
from tests import tiny

H200 = Ceiling(bytes_per_s=3.85e12, flops_per_s=790e12)
A_TREE = ["--tree-topk", "3", "--tree-depth", "5", "--num-draft-tokens", "11"]


def spec(preset: str, *, drafter: bool = False) -> DecodeSpec:
    target = Graph(Gemma4, TARGET_PRESETS[preset], "bfloat16")
    if not drafter:
        return DecodeSpec(target, None)
    config, _ = bench.drafter_config(preset)
    return DecodeSpec(target, Graph(DFlashDrafter, config, "bfloat16"), config.block_size - 1)


def mtp(preset: str, drafts: int, tree: Tree | None = None) -> DecodeSpec:
    drafter, _ = bench.random_drafter(preset, "mtp", "bfloat16")
    return DecodeSpec(spec(preset).target, drafter, drafts, tree)


@pytest.mark.parametrize(
    ("preset", "billions"),
    [("e2b", 4.629), ("e4b", 7.463), ("12b", 11.907), ("26b-a4b", 25.233), ("31b", 30.697)],
)
def test_presets_have_the_released_number_of_text_parameters(preset: str, billions: float) -> None:
    sizes = [a.size for a in spec(preset).target.abstract_params().values()]
    assert sum(sizes) / 1e9 == pytest.approx(billions, abs=5e-4)


def test_a_dense_target_reads_every_weight_once_a_step() -> None:
    cost = bench.step_cost(spec("31b"), batch=1, context=256)
    assert cost.weight_bytes == pytest.approx(2 * 30.697e9, rel=1e-4)
    assert cost.flops == pytest.approx(2 * 30.697e9, rel=0.02)  # attention adds a little


def test_tables_that_are_looked_up_cost_their_rows() -> None:
    """E2B is 4.63B parameters, but 2.35B of them are the per-layer table: a step reads one row of it."""
    config = TARGET_PRESETS["e2b"]
    table = config.per_layer_vocab_size * config.num_layers * config.per_layer_input_size
    cost = bench.step_cost(spec("e2b"), batch=1, context=256)
    assert cost.weight_bytes == pytest.approx(2 * (4.6286e9 - table), rel=1e-3)


def test_experts_cost_what_routing_reaches() -> None:
    config = TARGET_PRESETS["26b-a4b"]
    assert bench.expected_experts(config, 1) == pytest.approx(8)
    assert bench.expected_experts(config, 16) == pytest.approx(82, abs=0.5)
    assert bench.expected_experts(config, 512) == pytest.approx(128)
    one, many = (bench.step_cost(spec("26b-a4b"), batch, 256) for batch in (1, 32))
    experts = 30 * 3 * 2816 * 704 * 2  # bytes of one expert in all layers
    expected = (bench.expected_experts(config, 32) - 8) * experts
    assert many.weight_bytes - one.weight_bytes == pytest.approx(expected)


def test_keys_and_values_stop_growing_at_the_window() -> None:
    def kv(context: int) -> float:
        return bench.step_cost(spec("31b"), batch=1, context=context).kv_bytes

    sliding, full = 50 * 16 * 256, 10 * 4 * 512  # layers, kv heads, head dim
    assert kv(99) == 2 * 2 * 100 * (sliding + full)
    assert kv(5999) == 2 * 2 * (1024 * sliding + 6000 * full)


@pytest.mark.parametrize(
    ("preset", "batch", "drafter", "milliseconds"),
    [
        ("31b", 1, False, 15.9),
        ("31b", 1, True, 17.5),
        ("31b", 32, True, 44),
        ("26b-a4b", 1, True, 9.5),
    ],
)
def test_floors_of_an_h200(preset: str, batch: int, drafter: bool, milliseconds: float) -> None:
    floor_s = bench.step_floor_s(spec(preset, drafter=drafter), batch, 384, H200)
    assert floor_s * 1e3 == pytest.approx(milliseconds, rel=0.02)


@pytest.mark.parametrize("preset", list(MTP_PRESETS))
def test_an_assistant_is_read_once_a_draft(preset: str) -> None:
    """Every weight, the embedding's row and the lent K/V; of a head with centroids, 4096 rows."""
    config, one = MTP_PRESETS[preset], mtp(preset, 1)
    assert one.drafter is not None
    params = one.drafter.abstract_params()
    parameters = sum(a.size for n, a in params.items() if n != "token_ordering")
    unread = 0
    if config.num_centroids:
        unread = (config.vocab_size - 4096) * config.hidden_size
    cost = bench.step_costs(one, batch=1, context=384)[1]
    order = 4 * 4096 if config.num_centroids else 0
    expected = 2 * (parameters - unread + config.backbone_hidden_size) + order
    assert cost.weight_bytes == pytest.approx(expected)
    kv = config.num_kv_heads * config.head_dim + config.full_num_kv_heads * config.full_head_dim
    assert cost.kv_bytes == 2 * 2 * 384 * kv
    seven = bench.step_costs(mtp(preset, 7), batch=1, context=384)[1]
    assert seven.weight_bytes == pytest.approx(7 * cost.weight_bytes)
    assert seven.kv_bytes == 7 * cost.kv_bytes
    assert seven.flops == pytest.approx(7 * cost.flops)


@pytest.mark.parametrize(
    ("preset", "millions"), [("e4b", 78.8), ("26b-a4b", 419.7), ("31b", 469.5)]
)
def test_assistants_have_the_released_number_of_parameters(preset: str, millions: float) -> None:
    drafter = mtp(preset, 1).drafter
    assert drafter is not None
    sizes = [a.size for a in drafter.abstract_params().values()]
    assert sum(sizes) / 1e6 == pytest.approx(millions, abs=0.05)


def test_an_assistant_sees_no_more_than_the_window_on_sliding_layers() -> None:
    def kv(context: int) -> float:
        return bench.step_costs(mtp("31b", 1), batch=1, context=context)[1].kv_bytes

    assert kv(5000) == 2 * 2 * (1024 * 16 * 256 + 5000 * 4 * 512)


def test_a_tree_takes_a_pass_a_level() -> None:
    """Five levels read the weights five times, whatever the number of nodes; wider ones cost arithmetic."""
    chain = bench.step_costs(mtp("31b", 5), 1, 384)[1]
    verify, tree = bench.step_costs(mtp("31b", 11, Tree(3, 5)), 1, 384)
    rows = 4 * 2 * 5376 * 2  # bytes of two more embeddings in four levels
    assert tree.weight_bytes == pytest.approx(chain.weight_bytes + rows)
    assert tree.kv_bytes == chain.kv_bytes
    assert tree.flops == pytest.approx(chain.flops * (1 + 4 * 3) / 5)
    assert verify == bench.step_costs(mtp("31b", 11), 1, 384)[0]  # the target takes all nodes


@pytest.mark.parametrize(
    ("preset", "drafts", "batch", "milliseconds"),
    [
        ("26b-a4b", 7, 1, 7.5),
        ("26b-a4b", 7, 8, 14.4),
        ("31b", 7, 1, 17.6),
        ("31b", 7, 32, 22),
        ("e4b", 5, 1, 2.5),
        ("e4b", 5, 32, 3.0),
    ],
)
def test_floors_of_an_h200_with_an_assistant(
    preset: str, drafts: int, batch: int, milliseconds: float
) -> None:
    floor_s = bench.step_floor_s(mtp(preset, drafts), batch, 384, H200)
    assert floor_s * 1e3 == pytest.approx(milliseconds, rel=0.03)


def test_the_floor_is_the_slower_of_memory_and_arithmetic() -> None:
    ceiling = Ceiling(bytes_per_s=10, flops_per_s=100)
    assert StepCost(30, 10, 100).floor_s(ceiling) == 4
    assert StepCost(30, 10, 1000).floor_s(ceiling) == 10


@pytest.mark.parametrize("preset", list(TARGET_PRESETS))
def test_every_preset_gets_a_drafter_that_fits(preset: str) -> None:
    config, name = bench.drafter_config(preset)
    config.check_fits(TARGET_PRESETS[preset])
    assert preset in name


def test_memory_is_weights_caches_and_logits() -> None:
    need = memory.footprint(spec("31b"), 4, 32768, make_mesh(devices=jax.devices()[:1]))
    assert need.weights == pytest.approx(2 * 30.697e9, rel=1e-4)
    ring, full = 50 * 16 * 256 * 1088, 10 * 4 * 512 * 32768  # layers, kv heads, head dim, slots
    assert need.caches == 4 * 2 * 2 * (ring + full)
    assert need.logits == 4 * 4 * 262144
    assert str(need) == "70.5 GiB a device (57.2 weights, 13.3 caches, 0.0 logits)"


def test_a_run_larger_than_the_device_is_refused_with_what_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair, mesh = DecodeSpec(Graph(Gemma4, tiny.config("31b"), "float32"), None), make_mesh()
    limit = memory.footprint(pair, 5, 1024, mesh).total
    monkeypatch.setattr(memory, "bytes_limit", lambda mesh: limit)
    memory.check_fits(pair, 5, 1024, mesh)
    with pytest.raises(memory.DeviceMemoryError) as refused:
        memory.check_fits(pair, 8, 1088, mesh)
    found = re.findall(r"(\d+) rows of (\S+)", str(refused.value))
    assert [rows for rows, _ in found] == ["4", "8"]
    longest = int(found[1][1])
    memory.check_fits(pair, 8, longest, mesh)
    with pytest.raises(memory.DeviceMemoryError, match="8 rows with caches"):
        memory.check_fits(pair, 8, longest + 64, mesh)
    limit = 1 << 16
    with pytest.raises(memory.DeviceMemoryError, match="not one row fits; bfloat16 halves this"):
        memory.check_fits(pair, 1, 256, mesh)
    with pytest.raises(memory.DeviceMemoryError, match="the weights need"):
        memory.check_weights_fit(pair.target, mesh)


def tiny_pair(*, synthetic_acceptance: float | None) -> Pair:
    target, target_params = tiny.target("26b-a4b")
    config = DFlashConfig(
        vocab_size=target.config.vocab_size,
        hidden_size=target.config.hidden_size,
        layer_types=("sliding", "full"),
        causal=(True, False),
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=64,
        block_size=4,
        mask_token_id=4,
        feature_layers=(0, 2),
        num_target_layers=target.config.num_layers,
        max_positions=4096,
        sliding_window=16,
    )
    drafter = Graph(DFlashDrafter, config, "float32")
    return Pair(
        DecodeSpec(target, drafter, 3, synthetic_acceptance=synthetic_acceptance),
        target_params,
        tiny.random_params(drafter, 1),
        "tiny",
        "tiny DFlash",
    )


def test_report_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "measure_ceiling", lambda *_: H200)
    pair = tiny_pair(synthetic_acceptance=2.5)
    prompts = pair.prompts(2, 20, 0)
    assert prompts.shape == (2, 20)
    report = bench.run(Console(quiet=True), pair, prompts, [2], new_tokens=40, repeats=2, seed=0)
    report = json.loads(json.dumps(report))
    assert report["versions"].keys() == {"jaxspec", "python", "jax", "jaxlib", "flax", "numpy"}
    assert (report["dtype"], report["platform"], report["prompt_length"]) == ("float32", "cpu", 20)
    assert report["prompts"] == "random prompts of 20 tokens"
    plain, speculative = report["results"]
    assert plain.keys() == {f.name for f in dataclasses.fields(bench.Result)}
    assert (plain["mode"], plain["steps"], plain["acceptance_length"]) == ("plain", 40, None)
    assert speculative["acceptance"] == "synthetic"
    assert speculative["acceptance_length"] == pytest.approx(2.5, abs=0.4)  # 2 or 3 by chance
    assert 14 <= speculative["steps"] <= 20
    for result in report["results"]:
        assert result["batch_size"] == 2
        spread = result["step_ms"]
        assert 0 < spread["min"] <= spread["median"] <= spread["max"]
        experts = result["distinct_experts"]
        assert 3 <= experts["min"] <= experts["median"] <= experts["max"] <= 8


def tiny_mtp(*, tree: Tree | None, synthetic_acceptance: float | None = None) -> Pair:
    target, target_params = tiny.target("e4b")
    drafter = Graph(MTPDrafter, MTPConfig.from_hf(tiny.hf_assistant_config("e4b")), "float32")
    spec = DecodeSpec(target, drafter, 5, tree, synthetic_acceptance=synthetic_acceptance)
    return Pair(spec, target_params, tiny.random_params(drafter, 1), "tiny", "tiny MTP")


@pytest.mark.parametrize(
    ("tree", "label", "depth"), [(None, "mtp 5", 5), (Tree(2, 3), "mtp tree 5", 3)]
)
def test_report_names_the_drafter_and_its_tree(
    monkeypatch: pytest.MonkeyPatch,
    tree: Tree | None,
    label: str,
    depth: int,
) -> None:
    monkeypatch.setattr(bench, "measure_ceiling", lambda *_: H200)
    pair = tiny_mtp(tree=tree)
    console = Console(record=True, width=80, quiet=False, file=io.StringIO())
    prompts = pair.prompts(1, 12, 0)
    report = bench.run(console, pair, prompts, [1], new_tokens=12, repeats=1, seed=0)
    report = json.loads(json.dumps(report))
    assert (report["drafter_kind"], report["num_draft_tokens"]) == ("mtp", 5)
    assert report["tree"] == (None if tree is None else {"topk": 2, "depth": 3})
    plain, speculative = report["results"]
    assert (plain["label"], plain["draft_floor_ms"]) == ("plain", 0)
    assert speculative["label"] == label
    assert 0 < speculative["draft_floor_ms"] < speculative["floor_ms"]
    assert 1 <= speculative["acceptance_length"] <= depth + 1
    text = console.export_text()
    assert label in text
    assert ("a tree of topk 2 and depth 3" in text) == (tree is not None)


def test_experts_are_counted_over_all_nodes_of_a_tree() -> None:
    target, target_params = tiny.target("26b-a4b")
    config = MTPConfig.from_hf(tiny.hf_assistant_config("26b-a4b"))
    drafter = Graph(MTPDrafter, config, "float32")
    spec = DecodeSpec(target, drafter, 5, Tree(2, 3))
    pair = Pair(spec, target_params, tiny.random_params(drafter, 1), "tiny", "tiny MTP")
    result = bench.measure(pair, pair.prompts(1, 8, 0), H200, new_tokens=4, repeats=1, seed=0)
    assert result.distinct_experts is not None
    assert 3 <= result.distinct_experts.min <= result.distinct_experts.max <= 8


def test_random_weights_come_with_the_asked_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    config = MTPConfig.from_hf(tiny.hf_assistant_config("e4b"))
    monkeypatch.setitem(bench.TARGET_PRESETS, "e4b", tiny.config("e4b"))
    monkeypatch.setitem(bench.MTP_PRESETS, "e4b", config)
    pair = bench.make_pair("e4b", None, "mtp", dtype="float32")
    assert pair.drafter_name == "MTP of e4b, random weights"
    assert pair.spec.num_draft_tokens == config.num_draft_tokens
    assert pair.drafter_params is not None
    ordering = np.asarray(pair.drafter_params["token_ordering"])
    assert sorted(ordering) == list(range(config.vocab_size))
    assert not np.array_equal(ordering, np.arange(config.vocab_size))
    assert bench.make_pair("e4b", None, "none", dtype="float32").spec.drafter is None


def test_acceptance_is_real_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "measure_ceiling", lambda *_: H200)
    pair = tiny_pair(synthetic_acceptance=None)
    result = bench.measure(pair, pair.prompts(1, 8, 0), H200, new_tokens=8, repeats=1, seed=0)
    assert result.acceptance == "real"
    assert result.acceptance_length is not None
    assert 1 <= result.acceptance_length < 2  # a random drafter


def test_prompts_longer_than_a_chunk_are_fed_in_pieces() -> None:
    prompts = np.arange(2 * 1100, dtype=np.int32).reshape(2, 1100)
    chunks = bench._chunks(prompts)
    assert [c.tokens.shape[1] for c in chunks] == [512, 512, 76]
    assert [c.start.tolist() for c in chunks] == [[0, 0], [512, 512], [1024, 1024]]
    assert [c.is_last.tolist() for c in chunks] == [[False] * 2, [False] * 2, [True] * 2]
    np.testing.assert_array_equal(np.concatenate([c.tokens for c in chunks], axis=1), prompts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--random-weights", "e2b", "--target", "x"], "give no --target"),
        (["--random-weights", "e2b", "--drafter", "x"], "only mtp, dflash or none"),
        (["--tree-topk", "3", "--num-draft-tokens", "11"], "--tree-depth"),
        (
            ["--tree-topk", "3", "--tree-depth", "5", "--num-draft-tokens", "99"],
            "nodes, fewer than",
        ),
        ([*A_TREE, "--synthetic-acceptance", "2"], "--synthetic-acceptance is for chains"),
        (["--drafter", "none", "--num-draft-tokens", "3"], "needs a drafter"),
        (["--target", "no/such/place/here"], "no/such/place/here"),
    ],
)
def test_options_that_cannot_be_meant(options: list[str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    app = typer.Typer()
    app.command()(bench.bench_command)
    result = CliRunner().invoke(app, [*options, "--json", str(path)])
    assert result.exit_code == 2
    assert message in result.output
    assert not path.exists()
