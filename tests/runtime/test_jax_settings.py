"""Settings of JAX: random draws depend on none, and those that nothing can run with are refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import FieldError, Pair, Programs, Sampler
from jaxspec import state as states
from jaxspec.commands import startup
from jaxspec.rollout.arguments import _seeds
from jaxspec.rollout.rollout import row_keys
from jaxspec.runtime.jax_settings import JaxSettingsError

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def pair() -> Pair:
    return jaxspec.load()


def run(variable: str, *args: str) -> subprocess.CompletedProcess[str]:
    name, _, value = variable.partition("=")
    environment = {**os.environ, name: value}
    command = [sys.executable, "-m", "jaxspec", *args]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("JAX_PLATFORMS=CPU", "JAX_PLATFORMS is 'CPU': unset it, or set it to cpu"),
        ("JAX_DISABLE_JIT=maybe", "JAX cannot start: invalid truth value 'maybe'"),
        ("JAX_NUMPY_RANK_PROMOTION=raise", 'rank_promotion is raise: .* "allow" or "warn"'),
    ],
)
def test_a_command_refuses_a_setting_in_one_line(variable: str, expected: str):
    done = run(variable, "generate", "def f(x):")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: JAX")
    assert re.search(expected, line), line


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (jax.disable_jit(), "jax_disable_jit is True"),
        (jax.numpy_rank_promotion("raise"), "jax_numpy_rank_promotion is raise"),
        (jax.transfer_guard("disallow"), "jax_transfer_guard is disallow"),
    ],
)
def test_a_program_under_a_setting_is_refused(
    pair: Pair, setting: AbstractContextManager, expected: str
):
    fresh = Pair(pair.target, pair.drafter, Programs())
    with setting:
        with pytest.raises(JaxSettingsError, match=expected):
            jaxspec.load()
        with pytest.raises(JaxSettingsError, match=expected):
            fresh.generate("def f(x):", max_new_tokens=2)


def test_keys_do_not_depend_on_the_default_kind(pair: Pair):
    """Under JAX_DEFAULT_PRNG_IMPL=rbg, slots of an engine had keys that no row's key fits into."""
    sampler = Sampler(pair, max_new_tokens=4)
    seeds = jnp.array([[3, 0], [3, 1]], jnp.uint32)
    made = []
    for kind in ("threefry2x32", "rbg"):
        with jax.default_prng_impl(kind):
            state = jax.eval_shape(
                lambda: states.init_state(
                    sampler.spec,
                    2,
                    cache_length=64,
                    num_stop_ids=1,
                    cache_dtype=jnp.dtype("float32"),
                )
            )
            keys = states.row_keys(seeds), row_keys(jnp.uint32(3), 2), row_keys(seeds[:, 0], 2)
            assert {key.dtype for key in keys} == {state.keys.dtype}
            made.append([jax.random.key_data(key) for key in keys])
            if kind == "rbg":
                with pytest.raises(FieldError, match="impl='threefry2x32'"):
                    _seeds(jax.random.key(3), 2, "")
    jax.tree.map(np.testing.assert_array_equal, *made)


@pytest.mark.parametrize(
    ("variables", "share"),
    [
        ({}, "0.92"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, "0.5"),
        ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, None),  # its new name: JAX refuses both together
    ],
)
def test_commands_take_more_of_a_gpu_than_jax_does_by_itself(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], share: str | None
):
    old = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    for name in (old, "XLA_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    seen = []
    monkeypatch.setattr(jax, "devices", lambda: seen.append(os.environ.get(old)))
    startup.start_devices()
    assert seen == [share]
