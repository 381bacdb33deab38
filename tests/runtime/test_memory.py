"""What a machine has left for this process is known, and what cannot fit is refused before it is read or made."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from typer.testing import CliRunner

import jaxspec
from checkpoints_convert import hf_io
from jaxspec.cache import PAGE
from jaxspec.commands.bench import trace
from jaxspec.commands.cli import app
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from jaxspec.mesh import MESH_AXES
from jaxspec.options import Drafting
from jaxspec.registry import presets
from jaxspec.runtime import memory
from jaxspec.runtime.prefill import Shapes
from jaxspec.runtime.runtime import Runtime, cache_bucket, make_spec
from jaxspec.weights import memory as weight_memory
from jaxspec.weights.conversion import convert, to_hf
from jaxspec.weights.define import model_def_of, random_drafter, with_kv_dtype
from jaxspec.weights.host_memory import AvailableMemory, available_memory
from jaxspec.weights.sharding import make_mesh
from tests.cases import case
from tests.checkpoints_convert import hf_layout

GIB = 1 << 30
NO_LIMIT = 9223372036854771712  # as version 1 writes it


def machine(root: Path, files: dict[str, str]) -> Path:
    """Make a machine with 16 GiB free or in its page cache, 2 GiB of free swap, and these files."""
    meminfo = f"MemTotal: {32 << 20} kB\nMemAvailable: {16 << 20} kB\nSwapFree: {2 << 20} kB\n"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_machine_has_what_is_free_its_page_cache_and_its_swap(tmp_path: Path) -> None:
    found = available_memory(machine(tmp_path, {}))
    assert found is not None
    assert found.nbytes == 18 * GIB
    assert found.where.startswith("this machine (page cache and swap counted as free)")


def test_of_other_systems_nothing_is_known(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None


def test_a_control_group_of_version_2(tmp_path: Path) -> None:
    """A container of 8 GiB: 5 are used, 3 of these are page cache or slabs that the kernel gives back."""
    group = "sys/fs/cgroup/jobs/mine"
    files = {
        "proc/self/cgroup": "0::/jobs/mine\n",
        f"{group}/memory.max": f"{8 * GIB}\n",
        f"{group}/memory.current": f"{5 * GIB}\n",
        f"{group}/memory.stat": f"anon {2 * GIB}\nfile {2 * GIB}\nactive_file {GIB}\ninactive_file {GIB}\n"
        f"slab_reclaimable {GIB}\n",
        f"{group}/memory.swap.max": "0\n",
        f"{group}/memory.swap.current": "0\n",
    }
    found = available_memory(machine(tmp_path, files))
    assert found is not None
    assert found.nbytes == 6 * GIB
    assert "control group" in found.where
    assert "container" in found.way_out
    (tmp_path / group / "memory.swap.max").write_text("max\n")
    found = available_memory(tmp_path)
    assert found is not None
    assert found.nbytes == 8 * GIB  # and the machine's swap
    (tmp_path / group / "memory.max").write_text("max\n")
    found = available_memory(tmp_path)
    assert found is not None
    assert found.nbytes == 18 * GIB


def test_the_groups_above_limit_too(tmp_path: Path) -> None:
    """Schedulers limit the job; the group of its process has no limit. A container sees its group as the root."""
    above = {
        "sys/fs/cgroup/job/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/job/memory.current": f"{GIB}\n",
        "sys/fs/cgroup/job/memory.swap.max": "0\n",
        "sys/fs/cgroup/job/step/memory.max": "max\n",
        "sys/fs/cgroup/job/step/memory.current": f"{GIB}\n",
    }
    found = available_memory(machine(tmp_path, above | {"proc/self/cgroup": "0::/job/step\n"}))
    assert found is not None
    assert found.nbytes == 3 * GIB
    namespaced = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{GIB}\n",
        "sys/fs/cgroup/memory.swap.max": "0\n",
    }
    found = available_memory(machine(tmp_path, namespaced))
    assert found is not None
    assert found.nbytes == GIB


def test_a_control_group_of_version_1(tmp_path: Path) -> None:
    """Its files may be at the root of the tree, although the process is told the whole path."""
    group = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "4:memory:/docker/0123\n1:cpu:/docker/0123\n0::/\n",
        f"{group}/memory.limit_in_bytes": f"{6 * GIB}\n",
        f"{group}/memory.usage_in_bytes": f"{5 * GIB}\n",
        f"{group}/memory.memsw.limit_in_bytes": f"{6 * GIB}\n",
        f"{group}/memory.stat": f"total_active_file {GIB}\ntotal_inactive_file {GIB}\ntotal_swap 0\n",
    }
    found = available_memory(machine(tmp_path, files))
    assert found is not None
    assert found.nbytes == 3 * GIB
    (tmp_path / group / "memory.memsw.limit_in_bytes").write_text(f"{7 * GIB}\n")
    found = available_memory(tmp_path)
    assert found is not None
    assert found.nbytes == 4 * GIB  # of the machine's swap it may use one
    (tmp_path / group / "memory.limit_in_bytes").write_text(f"{NO_LIMIT}\n")
    found = available_memory(tmp_path)
    assert found is not None
    assert found.nbytes == 18 * GIB


@pytest.mark.parametrize(
    ("kind", "flag"), [(resource.RLIMIT_AS, "-v"), (resource.RLIMIT_DATA, "-d")]
)
def test_limits_of_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int, flag: str
) -> None:
    limits = {kind: 3 * GIB}
    monkeypatch.setattr(
        resource, "getrlimit", lambda kind: (limits.get(kind, resource.RLIM_INFINITY), -1)
    )
    status = f"Name:\tpython\nVmSize:\t{2 << 20} kB\nVmData:\t{2 << 20} kB\n"
    found = available_memory(machine(tmp_path, {"proc/self/status": status}))
    assert found is not None
    assert found.nbytes == GIB
    assert f"ulimit {flag}" in found.where
    assert f"ulimit {flag} unlimited" in found.way_out


# --- what fits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "drafts", "kv_dtype", "ahead", "is_enough"),
    [("mtp", 7, None, 16, True), ("dflash", 15, "fp8", 32, True), ("dflash", 15, None, 8, False)],
)
def test_256_requests_of_the_published_trace_fit_on_an_h200(
    kind: str, drafts: int, kv_dtype: str | None, ahead: int, is_enough: bool
) -> None:
    """26B-A4B with a drafter, in nine tenths of the memory. DFlash needs the smaller cache for it, as the docs say."""
    jobs = trace.generate(512, 7, None, 1 << 17)
    longest = max(job.prompt_tokens + job.new_tokens for job in jobs)
    target = with_kv_dtype(model_def_of(presets()["26b-a4b"], "bfloat16"), kv_dtype)
    drafter = random_drafter("26b-a4b", kind, "bfloat16")[0]
    spec = make_spec(target, drafter, Drafting(drafts))
    mesh = make_mesh(devices=jax.devices()[:1])
    length = cache_bucket(longest + spec.step_tokens)
    taken = memory.footprint(spec, 256 + ahead, length, mesh)
    logits = memory.footprint(spec, 256, length, mesh).logits
    assert (taken.weights + taken.caches + logits < 0.9 * 139 * GIB) == is_enough


# --- who asks ----------------------------------------------------------------------------------------


def has(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Let this machine have so much left."""
    monkeypatch.setattr(
        "jaxspec.weights.memory.available_memory",
        lambda: AvailableMemory(nbytes, "this machine", "get another"),
    )


def test_arrays_that_are_there_have_their_memory_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are loaded before the caches are made: they are no longer free, and count as room all the same."""
    has(monkeypatch, 1000)
    one = make_mesh(devices=jax.devices()[:1])
    before = weight_memory.bytes_limit(one)
    weights = jnp.zeros((1000,), jnp.float32)
    after = weight_memory.bytes_limit(one)
    assert before is not None
    assert after is not None
    assert after - before == weights.nbytes


def test_cpu_devices_share_their_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "live_arrays", lambda platform: [])
    has(monkeypatch, 1000)
    four = Mesh(np.array([jax.devices()[:1] * 4]), MESH_AXES)
    assert weight_memory.bytes_limit(make_mesh(devices=jax.devices()[:1])) == 1000
    assert weight_memory.bytes_limit(four) == 1000 // len(four.local_devices)


def test_an_engine_counts_rows_read_ahead_and_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only `Engine.fitting` asked, and a server's store took what its rows needed. Nothing is allocated before."""
    monkeypatch.setattr(jax, "live_arrays", lambda platform: [])
    target, model_def = case("31b").target, case("31b").target.model_def
    sizes = make_spec(target, None), 4, 1024, make_mesh(devices=jax.devices()[:1])
    store = dict(read_ahead=4, prefix_bytes=1 << 24)
    shapes = Shapes.of(model_def, 4, sizes[-1], invariant=False)
    needed = memory.footprint(*sizes, **store, pass_tokens=shapes.most_tokens(1024))
    four, eight = (memory.footprint(*sizes, read_ahead=n).caches for n in (0, 4))
    assert eight == 2 * four
    # Rows read ahead take no steps. All rows are one group.
    assert needed.logits == round((1.05 + 2) * 4 * 4 * model_def.config.vocab_size)
    pass_bytes = shapes.most_tokens(1024) * memory.bytes_a_token(model_def)
    assert needed.activations == pass_bytes - needed.logits > 0  # no step runs beside a pass
    assert needed.total == needed.weights + eight + pass_bytes + (1 << 24)

    def made(**options: int | None) -> Engine:
        return Engine(target, None, batch_size=4, cache_length=1024, **options)  # pyright: ignore[reportArgumentType]

    has(monkeypatch, needed.total)
    assert made(**store).read_ahead == 4
    has(monkeypatch, needed.total - 1)
    with monkeypatch.context() as patched:
        patched.setattr(Runtime, "__init__", None)  # nobody gets there
        with pytest.raises(memory.DeviceMemoryError) as refused:
            made(**store)
    said = str(refused.value)
    assert said.startswith("4 rows, and 4 that are read ahead, with caches of 1024 positions need")
    assert "GiB a device (" in said
    assert "0.0 prefixes" in said
    assert "3 rows of this length fit" in said
    assert "4 rows of 960 positions fit" in said
    assert "read_ahead=3 fits" in said
    assert f"prefix_bytes={(1 << 24) - 1} fits" in said
    for fits in (dict(store, read_ahead=3), dict(store, prefix_bytes=(1 << 24) - 1)):
        made(**fits)
    # Nobody asked for a number of rows read ahead: as many as there is room for.
    monkeypatch.setattr(memory, "default_read_ahead", lambda *_: 4)
    # They leave a sixteenth of a device: programs need more than can be known before they are compiled.
    has(monkeypatch, needed.total)
    assert made(read_ahead=None, prefix_bytes=1 << 24).read_ahead < 4
    has(monkeypatch, -(-needed.total * 16 // 15))
    assert made(read_ahead=None, prefix_bytes=1 << 24).read_ahead == 4
    # They leave three copies of the largest weight, if that is more: the compiler times products on copies.
    spec, *_, mesh = sizes
    table = weight_memory.largest_weight_bytes(spec.target, mesh)
    monkeypatch.setattr(memory, "SPARE", 0.0)
    has(monkeypatch, needed.total + 3 * table - 1)
    assert made(read_ahead=None, prefix_bytes=1 << 24).read_ahead < 4
    has(monkeypatch, needed.total + 3 * table)
    assert made(read_ahead=None, prefix_bytes=1 << 24).read_ahead == 4


def test_pages_take_what_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU but one part in 64, since programs are compiled before."""
    target, mesh = case("31b").target, make_mesh(devices=jax.devices()[:1])
    sizes = make_spec(target, None), 16, 4096, mesh
    need = memory.footprint(*sizes, cache_tokens=200 * PAGE).total
    table = weight_memory.largest_weight_bytes(target.model_def, mesh)

    def tokens(limit: int) -> int:
        return memory.plan_cache_tokens(*sizes, limit=limit, read_ahead=0)

    assert tokens(max(-(-need * 16 // 15), need + 3 * table)) // PAGE in (200, 201)
    monkeypatch.setattr(memory, "on_cpu", lambda mesh: False)
    assert tokens(-(-need * 64 // 63)) == 200 * PAGE
    assert tokens(need * 64 // 63 - 1) == 199 * PAGE


def test_a_compiled_program_that_does_not_fit_is_refused_with_its_own_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Temporary memory was not counted, and the run ended in RESOURCE_EXHAUSTED after compiling."""
    mesh = make_mesh(devices=jax.devices()[:1])
    program = jax.jit(lambda x: jnp.sort(x @ x.T).sum()).lower(jnp.ones((512, 2))).compile()
    sizes = program.memory_analysis()
    needed = sizes.temp_size_in_bytes + sizes.output_size_in_bytes
    assert needed > 512 * 512 * 4
    has(monkeypatch, needed)
    memory.check_compiled(program, mesh)
    has(monkeypatch, needed - 1)
    with pytest.raises(
        memory.DeviceMemoryError, match="GiB beside its arguments, and this machine"
    ):
        memory.check_compiled(program, mesh)
    engine = Engine(case("31b").target, None, batch_size=2, cache_length=64)
    monkeypatch.setattr(weight_memory, "bytes_free", lambda mesh: 10)
    with pytest.raises(memory.DeviceMemoryError, match="a compiled program needs"):
        list(engine.run([Request((2, 5), 2)]))


def sparse(directory: Path, size: str) -> Path:
    """Write a released checkpoint whose weights take no room on the disk."""
    directory.mkdir()
    config = hf_layout.RELEASED[size]
    (directory / "config.json").write_text(json.dumps(config))
    end, entries = 0, {}
    for name, shape in hf_layout.target_shapes(config).items():
        start, end = end, end + 2 * int(np.prod(shape))
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
    return directory


def test_a_checkpoint_that_cannot_fit_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 37 GB was read until memory ended, and then there was a traceback."""

    def never(*_: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(hf_io.HFCheckpoint, "read", never)
    monkeypatch.setattr(jax, "live_arrays", lambda platform: [])
    source = str(sparse(tmp_path / "e2b", "e2b"))
    has(monkeypatch, 8 * GIB)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))  # the command sets none then
    done = CliRunner().invoke(app, ["generate", "--target", source, "--prompt-ids", "2,5"])
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1] == (
        "error: the weights need 17.2 GiB a device in float32, and this machine has 8.0 GiB: "
        "bfloat16 halves this; "
        "get another; --dry-run of a command prints what fits, here and on other devices"
    )
    with pytest.raises(memory.DeviceMemoryError, match=r"in bfloat16, and this machine has 8\.0"):
        jaxspec.load(source, dtype="bfloat16")


def test_a_conversion_needs_room_for_its_largest_parameter_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = hf_layout.TINY["31b"]
    hf_layout.write(tmp_path / "hf", tiny, hf_layout.target_shapes(tiny))
    has(monkeypatch, 4_000)
    with pytest.raises(
        memory.DeviceMemoryError, match=r"the largest parameter, \S+, needs 0.0 GiB"
    ):
        convert(tmp_path / "hf", tmp_path / "ours")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]
    total = sum(2 * int(np.prod(s)) for s in hf_layout.target_shapes(tiny).values())
    has(monkeypatch, total // 2)
    convert(tmp_path / "hf", tmp_path / "ours")
    has(monkeypatch, 4_000)
    with pytest.raises(memory.DeviceMemoryError, match="largest parameter"):
        to_hf(tmp_path / "ours", tmp_path / "back")
