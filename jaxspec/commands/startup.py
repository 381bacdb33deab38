"""Start-up of commands: settings of JAX, loading, and messages about a lack of memory."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from jaxspec.commands.options import UsageError, note

try:
    import jax
except ValueError as refused:  # it reads its variables when it is imported
    raise UsageError(f"JAX cannot start: {refused}") from None

import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

import jaxspec
from jaxspec.api import BUNDLED, load
from jaxspec.commands import interruption
from jaxspec.commands.models import ModelOptions
from jaxspec.runtime.jax_settings import JaxSettingsError, check_devices, check_jax_settings
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.sharding import parse_mesh


@contextlib.contextmanager
def out_of_memory_explained(*lower: str) -> Iterator[None]:
    """Explain a lack of memory of the device or the machine.

    Args:
      lower: options of the command that save memory when lowered.

    Raises:
      UsageError: memory ran out.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"the device has not enough memory; lower {' or '.join(lower)}, use --dtype bfloat16, "
            f"or a smaller model ({reason})"
        ) from None


HEARTBEAT_S = 30
"""Seconds after which a process that is gone ends the others. JAX's own default is 100."""


def join_processes() -> bool:
    """Join the processes of `jax.distributed`; return whether this is the first of them.

    All run the same rounds on the same prompts, so each has all tokens. The first one shows them, or
    serves them.
    When one of them is gone, JAX ends the others with an error, after `HEARTBEAT_S` at most.

    Raises:
      UsageError: this process finds no others.
    """
    try:
        jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT_S)
    except (ValueError, RuntimeError) as error:
        raise UsageError(
            "--distributed: this process finds no others; start it by Slurm, Open MPI or "
            f"Kubernetes ({error})"
        ) from None
    atexit.register(
        jax.distributed.shutdown
    )  # it waits for the others: the first process serves them
    interruption.take_back()  # JAX took SIGTERM for a notice of preemption, which nobody reads
    start_devices()  # now, with our share of a GPU: comparing processes would start them with JAX's own
    return jax.process_index() == 0


def check_agreement(what: str, mine: object) -> None:
    """Compare something of all processes of `jax.distributed`. Different programs would wait for each other.

    Args:
      what: in the words of the user.
      mine: of this process; its `repr` is compared.

    Raises:
      UsageError: it is not the same in all of them.
    """
    digest = hashlib.sha256(repr(mine).encode()).digest()
    digests = multihost_utils.process_allgather(np.frombuffer(digest, np.uint8))
    others = np.flatnonzero((digests != digests[0]).any(axis=1)).tolist()
    if others:
        raise UsageError(
            f"--distributed: the {what} of process {', '.join(map(str, others))} are not those of "
            "process 0; run the same command with the same files in all"
        )


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Go on behind this block in all processes of `jax.distributed`, or in none.

    Raises:
      UsageError: the block failed in another process. Its own errors are raised as they are.
    """
    error = None
    try:
        yield
    except Exception as failure:
        error = failure
    if jax.distributed.is_initialized():
        failed = multihost_utils.process_allgather(np.asarray(error is not None))
        numbers = np.flatnonzero(failed).tolist()
        if numbers and error is None:
            listed = ", ".join(map(str, numbers))
            raise UsageError(f"--distributed: process {listed} cannot start; it says why")
    if error is not None:
        raise error


def smallest(number: int) -> int:
    """Return the smallest of a number of all processes. Each measures its own memory."""
    of_all = multihost_utils.process_allgather(np.frombuffer(np.int64(number).tobytes(), np.uint8))
    return int(np.ascontiguousarray(of_all).view(np.int64).min())


def set_compilation_cache(path: str | None, console: Console) -> None:
    """Keep compiled programs: in the user's cache directory, in another, or not ("off").

    If `path` is None, JAX's own JAX_COMPILATION_CACHE_DIR takes precedence.
    """
    if path == "off":
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if path is None and os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = home / "jaxspec" / "compiled" if path is None else Path(path)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if path is not None:
            raise UsageError(
                f"--compilation-cache: cannot make {directory}: {error.strerror}"
            ) from None
        note(console, f"compiled programs are not kept: cannot make {directory}: {error.strerror}")
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def prepare(models: ModelOptions, console: Console, *, bundled: bool = True) -> None:
    """Set up JAX for models before it starts: where programs are kept, and one thread for tiny ones.

    Args:
      bundled: without a target the bundled one is meant.
    """
    set_compilation_cache(models.compilation_cache, console)
    if models.target is None and bundled and models.mesh is None:
        use_one_thread()


def use_one_thread() -> None:
    """Run CPU programs on one thread, unless NPROC is set; call this before JAX starts.

    A step of the bundled models is about a hundred operations of 1 to 30 microseconds. XLA wakes a
    second thread for them so often that it loses time (jax 0.10.2, 2 cores, one row with DFlash:
    1.6 ms a step instead of 2.1; plain 0.66 instead of 0.58). If JAX may start on a GPU nothing is
    changed, since its compiler needs these threads.
    """
    other_devices = importlib.metadata.entry_points(group="jax_plugins")
    if jax.config.values["jax_platforms"] == "cpu" or not other_devices:
        os.environ.setdefault("NPROC", "1")


GPU_SHARE = 0.92
"""Share of a GPU's memory that commands take, as vLLM does. JAX by itself takes 0.75."""


def start_devices() -> None:
    """Start JAX's devices. Take `GPU_SHARE` of a GPU unless the user set another share.

    Raises:
      UsageError: there are none.
    """
    share = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    if not os.environ.get("XLA_CLIENT_MEM_FRACTION"):  # its new name; JAX refuses both together
        os.environ.setdefault(share, str(GPU_SHARE))
    try:
        check_devices()
    except JaxSettingsError as error:
        raise UsageError(str(error)) from None


def mesh_for(models: ModelOptions) -> Mesh | None:
    """Return the mesh of the options; None for one device.

    Raises:
      UsageError: it cannot be read, there are not enough devices, or a setting of JAX forbids what
        every program does.
    """
    start_devices()
    try:
        check_jax_settings()
    except JaxSettingsError as error:
        raise UsageError(str(error)) from None
    try:
        return None if models.mesh is None else parse_mesh(models.mesh)
    except ValueError as error:
        raise UsageError(f"--{error}") from None


NOT_LOADED = ("mesh", "distributed", "compilation_cache", "text_only")
"""The options of models that `jaxspec.load` does not take as they are."""


def load_models(
    models: ModelOptions, *, read_weights: bool = True, vision: bool = False
) -> tuple[LoadedModel, LoadedModel | None]:
    """Load target and drafter, onto a mesh if the options have one; see `jaxspec.load`.

    Args:
      vision: whether prompts may have images, unless the options say text only.

    Raises:
      CheckpointError, ConfigError: one of them is incomplete or wrong.
    """
    options = {name: value for name, value in vars(models).items() if name not in NOT_LOADED}
    options |= dict(read_weights=read_weights, vision=vision and not models.text_only)
    target, drafter = load(**options, mesh=mesh_for(models))
    return target, drafter


def has_all_files(source: str | None) -> bool:
    """Return whether a target that was loaded without weights has all other files: no hub id has."""
    return source is None or Path(source).expanduser().is_dir()


def shorten(source: str) -> str:
    """Return a source as text, with a short name for the bundled models."""
    path = Path(source)
    return f"bundled {path.name}" if path.parent == BUNDLED else source


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of jaxspec, of Python and of these packages."""
    own = {"jaxspec": jaxspec.__version__, "python": platform.python_version()}
    return {**own, **{name: importlib.metadata.version(name) for name in packages}}
