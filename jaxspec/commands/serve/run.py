"""Run of `jaxspec serve`: bind, load, serve, drain. Read `run`."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh
from rich.console import Console

from jaxspec import row_subset
from jaxspec.api import BUNDLED
from jaxspec.commands import interruption
from jaxspec.commands.dry_run import Plan, write
from jaxspec.commands.generate.rows import models_digest
from jaxspec.commands.models import ModelOptions
from jaxspec.commands.options import UsageError, note
from jaxspec.commands.prefixes import GIB, prefix_bytes
from jaxspec.commands.serve.network_options import NetworkOptions
from jaxspec.commands.startup import (
    check_agreement,
    has_all_files,
    join_processes,
    load_models,
    out_of_memory_explained,
    prepare,
    shorten,
    smallest,
    together,
    versions,
)
from jaxspec.configs.base import ConfigError, GenerationDefaults
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import check_max_cache_length
from jaxspec.options import (
    CacheTokens,
    Drafting,
    FieldError,
    ProgramFeatures,
    parse_cache_tokens,
)
from jaxspec.runtime.prefill import on_cpu
from jaxspec.runtime.runtime import cache_length_for, make_spec
from jaxspec.serving import processes, server
from jaxspec.serving.app import make_app
from jaxspec.serving.metrics import Metrics
from jaxspec.serving.middleware import JsonLines
from jaxspec.serving.open_engine import OpenEngine
from jaxspec.serving.parse_request import ServingModel
from jaxspec.serving.processes import LeadingEngine, watch
from jaxspec.serving.prompt_logprobs import PromptScorer
from jaxspec.serving.settings import ProgramOptions, Settings
from jaxspec.state import DecodeSpec
from jaxspec.text.grammars import GrammarTokens
from jaxspec.tokenizer import Tokenizer, TokenizerError
from jaxspec.weights.loading import CheckpointError, LoadedModel
from jaxspec.weights.memory import DeviceMemoryError, format_gib
from jaxspec.weights.sharding import mesh_of

USER_ERRORS = (CheckpointError, ConfigError, DeviceMemoryError, TokenizerError)
CACHE_LENGTH = 4096
API_KEY = "JAXSPEC_API_KEY"
HOLDS_NONE = "is for what no longer fits on the device: it holds none"


def run(
    network: NetworkOptions,
    models: ModelOptions,
    programs: ProgramOptions,
    drafting: Drafting,
    settings: Settings,
    console: Console,
) -> None:
    """Serve until a signal ends it.

    Raises:
      USER_ERRORS, UsageError: the server cannot start.
    """
    if not settings.api_key and (key := os.environ.get(API_KEY)) is not None:
        if not key:
            raise UsageError(f"{API_KEY} is empty; give it a key, or unset it to serve without one")
        settings = dataclasses.replace(settings, api_key=(key,))
    if network.dry_run:
        return dry_run(models, programs, drafting, console)
    if models.distributed and not join_processes():
        return follow(models, programs, drafting, console)
    with contextlib.ExitStack() as stack:
        stack.enter_context(out_of_memory_explained("--slots", "--cache-length"))
        with together():
            bound = stack.enter_context(contextlib.closing(bind(network)))
            check_tls(network)
            prepare(models, console)
        if models.target and not models.drafter:
            note(console, "no --drafter was given: decoding plainly, one token a step")
        loaded = load(models, programs, drafting, console)
        target, engine, scorer = loaded.target, loaded.engine, loaded.scorer
        model = ServingModel(
            names=settings.served_model_name or (name_of(target),),
            tokenizer=loaded.tokenizer,
            grammars=loaded.grammars,
            no_grammars=loaded.no_grammars,
            spec=engine.spec,
            generation=target.generation or GenerationDefaults(),
            cache_length=engine.cache_length,
            settings=settings,
            num_stop_ids=engine.num_stop_ids,
        )
        metrics = Metrics(model.names[0])
        log_to_stderr()
        leading = LeadingEngine(engine, scorer) if models.distributed else None
        open_engine = OpenEngine(
            leading or engine,
            max_waiting=settings.max_waiting,
            warm_up=not network.no_warm_up,
            observer=metrics,
        )
        if leading:
            watch(open_engine.fail)
        runner = server.make_server(
            make_app(model, open_engine, leading.score if leading else scorer, metrics),
            open_engine,
            drain_s=network.drain_timeout,
            tls_cert=network.tls_cert,
            tls_key=network.tls_key,
        )
        interruption.ask_first(runner.handle_signal)
        scheme = "http" if network.tls_cert is None else "https"
        host, port = bound.getsockname()[:2]
        address = f"[{host}]" if ":" in host else host
        stats = engine.prefix_stats
        prefixes = f", {format_gib(stats.pool_bytes)} GiB for prefixes" if stats else ""
        pages = f" in pages for {engine.cache_tokens:,} tokens" if engine.runtime.paging else ""
        console.print(
            f"serving {model.names[0]} on {scheme}://{address}:{port}/v1, {engine.batch_size} "
            "slots of "
            f"{engine.cache_length} positions{pages}{prefixes}",
            markup=False,
            soft_wrap=True,
        )
        runner.run(sockets=[bound])
        open_engine.close(server.CLOSE_S)
    if open_engine.state == "failed":
        failed = "the engine has failed; the log says why"
        if leading:  # exit functions would wait for the other processes, which wait for this one
            console.print(f"error: {failed}", style="red", markup=False, soft_wrap=True)
            interruption.leave(2)
        raise UsageError(failed)
    code = 130 if runner.signal == signal.SIGINT else 0
    if leading and not open_engine.is_working:
        leading.end()
        jax.distributed.shutdown()
    if runner.num_unfinished or open_engine.is_working:
        interruption.leave(code)
    if code:
        raise SystemExit(code)


@dataclass(frozen=True)
class Loaded:
    """All that each process of a server has."""

    target: LoadedModel
    tokenizer: Tokenizer
    grammars: GrammarTokens | None
    no_grammars: str
    engine: Engine
    scorer: PromptScorer


def load(
    models: ModelOptions, programs: ProgramOptions, drafting: Drafting, console: Console
) -> Loaded:
    """Load the models, and make the engine. All processes of a server have to call this together.

    Raises:
      USER_ERRORS, UsageError: the server cannot start.
    """
    if models.distributed:
        check_agreement("versions", versions("jax", "jaxlib", "numpy"))
        check_agreement("options", (models, programs, drafting))
    with console.status("[dim]loading the models"), together():
        target, drafter = load_models(models, vision=True)
        tokenizer = Tokenizer.load(target.directory)
    grammars, no_grammars = grammars_of(target, tokenizer, programs, drafting)
    program_features = dataclasses.replace(programs.program_features, grammars=grammars is not None)
    engine = make_engine(target, drafter, programs, program_features, drafting)
    if models.distributed:
        check_agreement("models", models_digest(engine.spec, target, drafter))
        sizes = engine.batch_size, engine.read_ahead, engine.cache_length, engine.runtime.paging
        check_agreement("caches, which --cache-tokens and --prefix-gib make alike,", sizes)
    scorer = PromptScorer(target, programs.max_logprobs)
    return Loaded(target, tokenizer, grammars, no_grammars, engine, scorer)


def follow(
    models: ModelOptions, programs: ProgramOptions, drafting: Drafting, console: Console
) -> None:
    """Make the calls of the first process until it ends.

    Raises:
      USER_ERRORS, UsageError: the server cannot start.
    """
    quiet = Console(quiet=True)
    with together():
        prepare(models, quiet)
    with out_of_memory_explained("--slots", "--cache-length"):
        loaded = load(models, programs, drafting, quiet)
    who = f"process {jax.process_index()}"
    signals: list[int] = []

    def leave_to_first(number: int) -> bool:
        """Return whether this process goes on: a launcher's signal comes to the first one, which drains."""
        signals.append(number)
        note(console, f"{who} ends when process 0 has drained; a second signal ends it now")
        return len(signals) == 1

    interruption.ask_first(leave_to_first)
    console.print(f"{who} follows process 0, and serves no HTTP", markup=False, soft_wrap=True)
    try:
        processes.follow(loaded.engine, loaded.scorer, loaded.tokenizer)
    except Exception:
        console.print_exception()
        interruption.leave(1)


def dry_run(
    models: ModelOptions, programs: ProgramOptions, drafting: Drafting, console: Console
) -> None:
    """Print the memory of the server.

    Raises:
      USER_ERRORS, UsageError: the server would not start, whatever the memory.
    """
    prepare(models, console)
    target, drafter = load_models(models, read_weights=False, vision=True)
    if has_all_files(models.target):
        grammars_of(target, Tokenizer.load(target.directory), programs, drafting)
    spec, length = sizes_of(target, drafter, programs, programs.program_features, drafting)
    mesh = mesh_of(target=target.params)
    plan = Plan(
        spec,
        mesh,
        programs.slots,
        length,
        read_ahead=None,
        max_prefill_tokens=programs.max_prefill_tokens,
        invariant=programs.invariant,
        cache_tokens=cache_tokens_of(programs, spec, mesh),
        prefix_gib=programs.prefix_gib,
    )
    if programs.prefix_host_gib and not plan.need[1].prefixes:
        raise FieldError("prefix_host_gib", HOLDS_NONE)
    write(plan, name_of(target), None)


def bind(network: NetworkOptions) -> Any:
    """Return a socket that is bound to the server's address.

    Raises:
      UsageError: the address is in use, or not this machine's.
    """
    try:
        return server.bind(network.host, network.port)
    except OSError as error:
        is_port_error = error.errno in (errno.EADDRINUSE, errno.EACCES)
        raise UsageError(
            f"--host {network.host} --port {network.port}: {error.strerror or error}; give another "
            f"{'--port' if is_port_error else '--host'}"
        ) from None


def check_tls(network: NetworkOptions) -> None:
    """Check the TLS files.

    Raises:
      UsageError: the certificate or its key cannot be used.
    """
    if network.tls_cert is None or network.tls_key is None:
        return
    for name, file in (("--tls-cert", network.tls_cert), ("--tls-key", network.tls_key)):
        try:
            open(file, "rb").close()
        except OSError as error:
            raise UsageError(f"{name} {file}: {error.strerror or error}") from None
    try:
        server.check_tls(network.tls_cert, network.tls_key)
    except OSError as error:  # ssl.SSLError is one
        raise UsageError(
            f"--tls-cert {network.tls_cert} --tls-key {network.tls_key}: {error}; expected PEM "
            "files, the "
            "certificate's own key, and no password"
        ) from None


def grammars_of(
    target: LoadedModel, tokenizer: Tokenizer, programs: ProgramOptions, drafting: Drafting
) -> tuple[GrammarTokens | None, str]:
    """Return the tokenizer's side of grammars; or None, and the message that refuses grammars."""
    if jax.process_count() > 1:
        message = "this server runs in several processes, which follow no grammars; use one process"
        return None, message
    if programs.no_grammars:
        return None, "this server was started with --no-grammars"
    if drafting.tree is not None:
        return None, "this server drafts trees, which follow no grammars"
    try:
        return GrammarTokens.of_model(target, tokenizer), ""
    except FieldError as error:
        return None, f"this server follows none: {error}"


def make_engine(
    target: LoadedModel,
    drafter: LoadedModel | None,
    programs: ProgramOptions,
    program_features: ProgramFeatures,
    drafting: Drafting,
) -> Engine:
    """Make the engine.

    Raises:
      DeviceMemoryError: the slots do not fit on the device.
      FieldError: `cache_length` is larger than the model allows, or an option of prefixes is wrong.
    """
    shared: dict[str, Any] = dict(
        drafting=drafting,
        program_features=program_features,
        batch_size=programs.slots,
        num_stop_ids=programs.max_stop_ids,
        steps_per_return=programs.steps_per_return,
        max_prefill_tokens=programs.max_prefill_tokens,
        choose_length=programs.choose_length,
        invariant=programs.invariant,
    )
    spec, length = sizes_of(target, drafter, programs, program_features, drafting)
    tokens = cache_tokens_of(programs, spec, mesh_of(target=target.params))
    shared |= dict(cache_length=length, cache_tokens=tokens)
    engine = Engine(target, drafter, **shared)
    shared["read_ahead"] = engine.read_ahead
    nbytes = prefix_bytes(engine, programs.prefix_gib, takes_all=tokens == "auto")
    if jax.process_count() > 1:
        nbytes = smallest(nbytes)
    host_bytes = int(programs.prefix_host_gib * GIB)
    if host_bytes and not nbytes:
        raise FieldError("prefix_host_gib", HOLDS_NONE)
    if not nbytes:
        return engine
    return Engine(target, drafter, prefix_bytes=nbytes, prefix_host_bytes=host_bytes, **shared)


def cache_tokens_of(programs: ProgramOptions, spec: DecodeSpec, mesh: Mesh) -> CacheTokens:
    """Return the tokens for which caches have room.

    By default slots share pages on a GPU, where they can, so that memory that does not hold every
    slot whole serves as many requests as it holds.
    """
    tokens = parse_cache_tokens(programs.cache_tokens)
    if tokens is None and not on_cpu(mesh) and row_subset.addressable(spec):
        return "auto"
    return tokens


def sizes_of(
    target: LoadedModel,
    drafter: LoadedModel | None,
    programs: ProgramOptions,
    program_features: ProgramFeatures,
    drafting: Drafting,
) -> tuple[DecodeSpec, int]:
    """Return what is decoded, and the positions of a slot.

    Raises:
      FieldError: `cache_length` is larger than the model allows.
    """
    spec = make_spec(target, drafter, drafting, program_features)
    length = programs.cache_length
    if length is None:
        length = min(CACHE_LENGTH, cache_length_for(spec, spec.target.config.max_positions))
    check_max_cache_length(spec, length)
    return spec, length


def name_of(target: LoadedModel) -> str:
    """Return the default of `served_model_name`."""
    return shorten(target.source).replace(f"bundled {BUNDLED.name}", "bundled").replace(" ", "-")


def log_to_stderr() -> None:
    """Write the log to standard error, as lines of JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name, level in (
        ("jaxspec.serving", logging.INFO),
        ("jaxspec.engine", logging.INFO),
        ("uvicorn", logging.WARNING),
    ):
        log = logging.getLogger(name)
        log.handlers, log.propagate = [handler], False
        log.setLevel(level)
