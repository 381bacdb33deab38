"""The script that times products: what it multiplies, and what it says without a GPU."""

from __future__ import annotations

import json
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import typer
from typer.testing import CliRunner

from jaxspec.commands.bench.floor import Ceiling
from pallas_kernels.int8_matmul.cases import SHAPES
from scripts import measure_products


@pytest.mark.parametrize("format", measure_products.FORMATS)
def test_every_format_is_multiplied(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the choice is the reference, so that there is no error. The profile is made up."""
    monkeypatch.setitem(SHAPES, "small", (128, 64))
    monkeypatch.setattr(measure_products, "CACHE_BYTES", 1)
    timed = []

    def kernel_times(call, runs):
        timed.append([call(run) for run in range(runs)])
        return {"product": 3.0, "sum": 1.0}

    monkeypatch.setattr(measure_products, "kernel_times", kernel_times)
    ceiling = Ceiling(bytes_per_s=1e9, flops_per_s=1e9)
    found = measure_products.measure("small", format, 4, "auto", runs=3, ceiling=ceiling)
    assert (found.us, found.error) == (4.0, 0.0)
    bits = {"bfloat16": 16, "int4": 4.5, "int4-g64": 4.25, "int4-g128": 4.125}.get(format, 8)
    scales = 0 if bits != 8 else 64 * 4
    assert found.gb_a_second * found.us * 1e3 == pytest.approx(128 * 64 * bits / 8 + scales)
    products = 2 * 4 * 128 * 64 / (2 if format == "fp8-dynamic" else 1)
    assert found.floor_us == pytest.approx(products / 1e3)
    results = timed[0]
    assert all(out.shape == (4, 64) and out.dtype == jnp.bfloat16 for out in results)
    assert not jnp.array_equal(results[0], results[1])  # another weight
    assert jnp.array_equal(results[0], results[2])


@pytest.mark.parametrize("format", [f for f in measure_products.FORMATS if f != "fp8-dynamic"])
def test_gate_and_up_are_activated(format: str) -> None:
    """By the operation that models have, and by a product and an activation."""
    x = jax.random.normal(jax.random.key(1), (4, 128), jnp.bfloat16)
    weight = measure_products.weight(format, 128, 64, jax.random.key(0))
    both = measure_products.product(format, "reference", jnp.float32)(x, *weight)
    expected = jax.nn.gelu(both[:, :32], approximate=True) * both[:, 32:]
    for implementation in ("auto", "reference"):
        run = measure_products.activated(format, implementation, jnp.float32)
        assert jnp.allclose(run(x, *weight), expected, rtol=1e-5, atol=1e-5)


def test_an_activation_is_for_gate_and_up() -> None:
    result = CliRunner().invoke(app(), ["--size", "31b down", "--activation"])
    assert result.exit_code == 2
    assert "is for gate_up, not for 31b down" in " ".join(result.output.split())


def test_the_table_and_its_lines_of_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a GPU, as far as the command knows. What cannot run is a line of the table that says why."""
    monkeypatch.setitem(SHAPES, "small", (128, 64))
    monkeypatch.setattr(measure_products, "CACHE_BYTES", 1)
    monkeypatch.setattr(measure_products, "kernel_times", lambda call, runs: {"product": 3.0})
    monkeypatch.setattr(measure_products, "measure_ceiling", lambda *_: Ceiling(1e12, 1e15))
    gpu = types.SimpleNamespace(platform="gpu", device_kind="A GPU")
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    to = tmp_path / "products.json"
    asked = ["--size", "small", "--rows", "4", "--runs", "2", "--json", str(to)]
    asked += ["--implementation", "auto", "--implementation", "mosaic"]
    result = CliRunner().invoke(app(), asked)
    assert result.exit_code == 0, result.output
    assert "A GPU" in result.output
    assert "mosaic" in result.output
    (line,) = map(json.loads, to.read_text().splitlines())
    assert (line["device"], line["size"], line["rows"], line["us"]) == ("A GPU", "small", 4, 3.0)


def app() -> typer.Typer:
    made = typer.Typer()
    made.command()(measure_products.main)
    return made


def test_a_call_takes_what_its_kernels_take() -> None:
    events = [("a", 5.0), ("b", 1.0), ("a", 7.0), ("a", 6.0), ("b", 3.0), ("b", 2.0)]
    assert measure_products.medians(events) == {"a": (6.0, 3), "b": (2.0, 3)}


def test_a_profile_without_a_gpu_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no kernel of a GPU"):
        measure_products.kernel_times(jax.jit(lambda run: run + 1), runs=1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--size", "99b"], "no size begins with 99b; there are 31b qkv"),
        (["--format", "int3"], "no format int3; there are bfloat16"),
        ([], "there is no GPU here"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app(), arguments, env={"COLUMNS": "400"})
    assert result.exit_code == 2
    assert said in result.output
