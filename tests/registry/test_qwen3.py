"""Qwen3 where the rest of jaxspec meets it: costs, memory, meshes, `bench`, `check`, chats.

It is the second family. It arrived without an edit to the algorithm page, the engine, the sampler,
or what `bench` measures. `tests/models` compares it with transformers. `tests/decode` shows that it
decodes losslessly. `tests/weights` has its files.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from jax.sharding import AbstractMesh, PartitionSpec
from tokenizers import decoders, models, pre_tokenizers
from typer.testing import CliRunner

from jaxspec import decode
from jaxspec import state as states
from jaxspec.commands.bench import floor, profile, run
from jaxspec.commands.bench import pair as pairs
from jaxspec.commands.bench.measure import chunks_of
from jaxspec.commands.bench.pair import make_pair
from jaxspec.commands.check import search
from jaxspec.commands.cli import app
from jaxspec.commands.models import ModelOptions
from jaxspec.configs.base import ConfigError
from jaxspec.configs.dflash import PRESETS as DFLASH_PRESETS
from jaxspec.configs.qwen3 import PRESETS
from jaxspec.decode_loop import decode_loop
from jaxspec.mesh import MESH_AXES
from jaxspec.options import Drafting
from jaxspec.runtime import memory
from jaxspec.shapes import Params
from jaxspec.state import DecodeSpec
from jaxspec.tokenizer import Tokenizer
from jaxspec.weights.conversion import write_weights
from jaxspec.weights.define import model_def_of, random_drafter
from jaxspec.weights.model_def import ModelDef
from jaxspec.weights.sharding import make_mesh
from tests import tiny, tiny_qwen3
from tests.cases import target
from tests.decode.test_qwen3 import b16

H200 = floor.Ceiling(bytes_per_s=3.85e12, flops_per_s=790e12)


def spec(preset: str, *, drafter: bool = False) -> DecodeSpec:
    model_def = model_def_of(PRESETS[preset], "bfloat16")
    if not drafter:
        return DecodeSpec(model_def, None)
    drafts, _ = random_drafter(preset, "dflash", "bfloat16")
    return DecodeSpec(model_def, drafts, Drafting(drafts.config.block_size - 1))


# --- costs and memory -----------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_every_weight_is_read_once_and_an_untied_embedding_is_looked_up(preset: str) -> None:
    """8B has 8.19B parameters. 0.62B are an embedding, of which a step reads one row."""
    one = spec(preset)
    sizes = {name: a.size for name, a in one.target.abstract_params().items()}
    c = PRESETS[preset]
    read = sum(sizes.values())
    if not c.tied_head:
        assert sizes["table"] == sizes["head_table"] == c.vocab_size * c.hidden_size
        read += c.hidden_size - sizes["table"]
    cost = floor.step_cost(one, batch=1, context=256)
    assert cost.weight_bytes == pytest.approx(2 * read)
    eight = floor.step_cost(one, batch=8, context=256)
    more_rows = 0 if c.tied_head else 2 * 7 * c.hidden_size
    assert eight.weight_bytes - cost.weight_bytes == pytest.approx(more_rows)
    assert eight.flops == pytest.approx(8 * cost.flops)


def test_keys_and_values_grow_with_the_context() -> None:
    def kv(context: int) -> float:
        return floor.step_cost(spec("qwen3-8b"), batch=2, context=context).kv_bytes

    assert kv(99) == 2 * 2 * 2 * 100 * 36 * 8 * 128
    assert kv(39_999) == 400 * kv(99)


@pytest.mark.parametrize(
    ("batch", "drafter", "milliseconds"), [(1, False, 3.95), (1, True, 4.84), (32, True, 12.15)]
)
def test_floors_of_an_h200_at_8b(batch: int, drafter: bool, milliseconds: float) -> None:
    """Plain: 7.57B parameters of 2 bytes at 3.85 TB/s are 3.93 ms, and keys and values the rest."""
    floor_s = floor.step_floor_s(spec("qwen3-8b", drafter=drafter), batch, 384, H200)
    assert floor_s * 1e3 == pytest.approx(milliseconds, rel=0.01)


def test_a_drafter_reads_the_targets_head_and_its_own_weights() -> None:
    """Keys and values are made of the block and of the context: their weights are read twice."""
    verify, draft = floor.step_costs(spec("qwen3-8b", drafter=True), 1, 256)
    assert verify.weight_bytes == pytest.approx(2 * (8.190735360e9 - (151_936 - 16) * 4096))
    d, heads, mlp = 4096, 32 * 128, 12_288
    layer = d * heads * 2 + 2 * (d * 2 * 8 * 128) + 3 * d * mlp + 2 * d + 2 * 128
    weights = 5 * layer + 5 * d * d + 2 * d + 151_936 * d
    assert draft.weight_bytes == pytest.approx(2 * weights)


def test_memory_is_weights_caches_and_logits() -> None:
    one_device = make_mesh(devices=jax.devices()[:1])
    need = memory.footprint(spec("qwen3-8b", drafter=True), 4, 4096, one_device)
    drafter = sum(
        a.size
        for a in model_def_of(DFLASH_PRESETS["qwen3-8b"], "bfloat16").abstract_params().values()
    )
    assert need.weights == 2 * (8_190_735_360 + drafter)
    assert need.caches == 4 * 2 * 2 * 8 * 128 * 4096 * (36 + 5)
    assert need.logits == round((1.05 + 2) * 4 * 4 * 16 * 151_936)  # of one group of rows


# --- meshes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [2, 4, 8])
@pytest.mark.parametrize("preset", PRESETS)
def test_nearly_all_of_every_released_size_is_split(preset: str, model: int) -> None:
    """Both tables, every matrix of every layer; norms are whole."""
    mesh: Any = AbstractMesh((1, model), MESH_AXES)
    for model_def in (
        model_def_of(PRESETS[preset], "bfloat16"),
        random_drafter(preset, "dflash", "bfloat16")[0],
    ):
        shardings = model_def.shardings(mesh)
        whole = total = 0
        for name, a in model_def.abstract_params().items():
            total += a.size
            if math.prod(shardings[name].shard_shape(a.shape)) == a.size:
                whole += a.size
                assert a.ndim == 1, f"{name} {a.shape} is whole"
        assert whole < 0.001 * total
        if model_def.config is PRESETS[preset]:
            assert shardings["table"].spec == PartitionSpec("model", None)


# --- bench ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_gets_a_drafter_that_fits(preset: str) -> None:
    model_def, name = random_drafter(preset, "dflash", "bfloat16")
    c: Any = model_def.config
    c.check_fits(PRESETS[preset])
    assert preset in name
    assert ("made up" in name) == (preset not in ("qwen3-4b", "qwen3-8b"))
    assert (c.layer_types, c.causal) == (("full",) * 5, (False,) * 5)
    assert (c.block_size, c.mask_token_id, len(c.feature_layers)) == (16, 151_669, 5)
    with pytest.raises(ValueError, match=f"there is no MTP assistant for {preset}; there is one"):
        random_drafter(preset, "mtp", "bfloat16")


def zeros(model_def: ModelDef, *_: object) -> Params:
    return {n: jnp.zeros(a.shape, a.dtype) for n, a in model_def.abstract_params().items()}


def test_the_released_shape_of_8b_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced, not run: no weights of that size are made, whatever room there is."""
    monkeypatch.setattr(pairs, "_random_params", zeros)
    monkeypatch.setattr("jaxspec.weights.memory.bytes_limit", lambda mesh: None)

    def traced() -> list[Any]:
        models, drafting = ModelOptions(dtype="bfloat16"), Drafting(synthetic_acceptance=6.0)
        pair = make_pair(models, drafting, "qwen3-8b", positions=513)
        spec, weights = pair.spec, (pair.target_params, pair.drafter_params)
        assert (pair.target_name, spec.step_tokens) == ("qwen3-8b, random weights", 16)
        assert pair.drafter_name == "DFlash as for qwen3-8b, random weights"
        assert sum(x.size for x in pair.target_params.values()) == 8_190_735_360
        state = states.init_state(
            spec, 1, cache_length=576, num_stop_ids=1, cache_dtype=jnp.dtype("bfloat16")
        )
        assert [c.k.shape for c in state.caches if c] == [(1, 8, 576, 128)] * 36
        (chunk,) = chunks_of(np.zeros((1, 256), np.int32), 512)
        state = decode.prefill(spec, *weights, state, jax.device_put(chunk))
        steps, block = jnp.int32(4), (state, jnp.zeros((1, spec.step_tokens), jnp.int32))
        return [
            (decode_loop(spec, *weights, state, steps), block[1]),
            profile.draft_loop(spec, *weights, block, steps),
            profile.verify_loop(spec, *weights, block, steps),
        ]

    step, draft, verify = jax.eval_shape(traced)
    assert jax.tree.map(jnp.shape, step) == jax.tree.map(jnp.shape, draft)
    assert jax.tree.map(jnp.shape, draft) == jax.tree.map(jnp.shape, verify)


def test_bench_measures_a_random_pair(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command with a preset's name, at a tiny size."""
    model = target("qwen3-untied")
    monkeypatch.setitem(PRESETS, "qwen3-8b", model.config)  # type: ignore[arg-type]
    monkeypatch.setitem(DFLASH_PRESETS, "qwen3-8b", b16(model).config)  # type: ignore[arg-type]
    monkeypatch.setattr(
        ModelDef, "random_params", lambda model_def, seed, *_: tiny.random_params(model_def, seed)
    )
    monkeypatch.setattr(run, "measure_ceiling", lambda *_: H200)
    file = tmp_path / "report.json"
    options = "--synthetic-acceptance 3 --context-length 40 --batch-size 1 --new-tokens 12"
    options += f" --repeats 1 --dtype float32 --json {file}"
    code, out, errors = invoke("bench", "--random-weights", "qwen3-8b", *options.split())
    assert code == 0, out + errors
    report = json.loads(file.read_text())
    assert report["target"] == "qwen3-8b, random weights"
    labels = [result["label"] for result in report["results"]]
    assert labels == ["plain", "dflash 4"]
    assert all(result["context_length"] == 40 for result in report["results"])


# --- check and chats ------------------------------------------------------------------------------

TEMPLATE = """
{%- for m in messages -%}
<|turn|>{{ m.role }}
{{ m.content }}<|end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|turn|>assistant
{% if enable_thinking is defined and not enable_thinking -%}
<thought></thought>
{% endif -%}
{%- endif -%}
"""
"""Turns between marks, and a switch. Turned off, it writes an empty thought for the model."""
SPECIAL = ["<pad>", "<eos>", "<|end|>", "<|turn|>", "<mask>"]


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer of Qwen's kind: bytes as letters, no BOS, the template in its config."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    alphabet = [letter for letter in alphabet if ord(letter) < 127]
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.add_special_tokens(SPECIAL)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(directory / "tokenizer.json"))
    config = {
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": "<|end|>",
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random pair in Hugging Face's layout."""
    root = tmp_path_factory.mktemp("qwen3")
    model = target("qwen3-untied")
    drafter = b16(model)
    c: Any = drafter.config
    configs = {
        "target": tiny_qwen3.hf_config("qwen3-untied"),
        "drafter": {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": c.block_size,
            "dflash_config": {
                "mask_token_id": c.mask_token_id,
                "target_layer_ids": list(c.feature_layers),
            },
            "num_target_layers": c.num_target_layers,
            "num_hidden_layers": c.num_layers,
            "hidden_size": c.hidden_size,
            "intermediate_size": c.intermediate_size,
            "num_attention_heads": c.num_heads,
            "num_key_value_heads": c.num_kv_heads,
            "head_dim": c.head_dim,
            "rope_theta": c.rope_theta,
            "vocab_size": c.vocab_size,
            "max_position_embeddings": c.max_positions,
            "use_sliding_window": False,
        },
    }
    for name, loaded in (("target", model), ("drafter", drafter)):
        directory = root / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(configs[name]))
        prefix = "model." if name == "target" else ""
        write_weights(loaded.config, loaded.params, directory, prefix=prefix, dtype="float32")
    generation = {"eos_token_id": [2, 1], "do_sample": True, "temperature": 0.6, "top_k": 20}
    (root / "target/generation_config.json").write_text(json.dumps(generation))
    write_tokenizer(root / "target")
    return root


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, pair: Path) -> Path:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(pair / "compiled"))
    monkeypatch.chdir(pair)
    return pair


def invoke(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(args))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.usefixtures("here")
def test_check_reads_the_pair_and_says_what_is_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are random, so it is not sound; the text is plain decoding's all the same."""
    alternatives, tried = search.alternatives, set()

    def one_of_them(*arguments: Any) -> Any:
        hypotheses, left_out = alternatives(*arguments)
        tried.update(hypothesis.name for hypothesis in hypotheses)
        tried.update(text.split(":")[0] for text in left_out)
        return [h for h in hypotheses if h.name == "all layers causal"], left_out

    monkeypatch.setattr(search, "alternatives", one_of_them)
    rows = ["--rows", "4", "--new-tokens", "16", "--batch-size", "4"]
    code, out, errors = invoke("check", "target", "drafter", *rows, "--json", "-")
    assert code == 1, errors
    report = json.loads(out)
    assert not report["sound"]
    assert report["differing"] == []
    said = {c["name"]: c["shown"] for c in report["conventions"]}
    assert said["embedding scale"] == "none: the target does not scale either"
    assert said["inside the block"] == "0 full bidirectional, 1 full bidirectional"
    assert said["logit soft cap"] == "none"
    assert said["mask id"] == "4"
    compared = {c["name"] for round_ in report["rounds"] for c in round_["comparisons"]}
    assert not [name for name in tried if "scaled" in name], "scaled or not is the same"
    assert compared == {"all layers causal"} < tried


@pytest.mark.usefixtures("here")
def test_chats_use_the_checkpoints_own_template_and_its_switch() -> None:
    """Thinking is on unless it is turned off. There is no BOS."""
    options = [
        "--drafter",
        "drafter",
        "--max-new-tokens",
        "4",
        "--cache-length",
        "64",
        "--json",
        "-",
    ]

    def prompt(*more: str) -> tuple[str, list[int]]:
        code, out, errors = invoke(
            "generate", "hi", "--target", "target", "--chat", *options, *more
        )
        assert code == 0, errors
        row = json.loads(out.splitlines()[0])
        return row["prompt"], row["prompt_ids"]

    on, on_ids = prompt()
    off, off_ids = prompt("--chat-template-kwargs", '{"enable_thinking": false}')
    assert on == "<|turn|>user\nhi<|end|>\n<|turn|>assistant\n"
    assert off == on + "<thought></thought>\n"
    assert on_ids == off_ids[: len(on_ids)]
    assert on_ids[0] == SPECIAL.index("<|turn|>")
    assert Tokenizer.load("target").bos_token_id is None


@pytest.mark.usefixtures("here")
def test_a_drafter_that_does_not_fit_is_refused(pair: Path) -> None:
    """The released drafter by its config alone, and a file that was made for a deeper target."""
    with pytest.raises(ConfigError, match="hidden_size: drafter 4096, target 72"):
        DFLASH_PRESETS["qwen3-8b"].check_fits(target("qwen3-untied").config)
    shutil.copytree(pair / "drafter", pair / "deeper")
    values = json.loads((pair / "deeper/config.json").read_text())
    (pair / "deeper/config.json").write_text(json.dumps(values | {"num_target_layers": 9}))
    code, _, errors = invoke("generate", "hi", "--target", "target", "--drafter", "deeper")
    assert code == 2
    assert "num_target_layers: drafter 9, target 3" in errors.replace("\n", " ")
