"""Servers on loopback: a shared one over the tiny pair, and others over engines without a model."""

from __future__ import annotations

import dataclasses
import importlib.util
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn

import jaxspec
from jaxspec.configs.base import GenerationDefaults
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Completion, Request
from jaxspec.options import ProgramFeatures
from jaxspec.runtime.runtime import Programs
from jaxspec.serving.app import make_app
from jaxspec.serving.metrics import Metrics
from jaxspec.serving.open_engine import EngineProtocol, OpenEngine
from jaxspec.serving.parse_request import ServingModel
from jaxspec.serving.prompt_logprobs import PromptScorer, PromptScores
from jaxspec.serving.server import bind
from jaxspec.serving.settings import Settings
from jaxspec.tokenizer import Tokenizer
from tests import tiny_pair as tiny
from tests.serving.fake_engine import FakeEngine
from tests.serving.scripted import CHAT_TEMPLATE, ScriptedEngine
from tests.text.chat.models import QWEN

GRAMMARS = importlib.util.find_spec("llguidance") is not None
FEATURES = ProgramFeatures(
    penalties=True, num_biases=4, logprobs=True, top_logprobs=3, grammars=GRAMMARS
)
SLOTS, CACHE_LENGTH = 4, 128


@dataclass(frozen=True)
class Live:
    """A server that runs."""

    client: httpx.Client
    open_engine: OpenEngine
    serving_model: ServingModel
    engine: Any
    offline: Engine | None = None

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def settle(self) -> None:
        """Wait until no request is left."""
        end = time.monotonic() + 20
        while self.open_engine.num_live:
            assert time.monotonic() < end, "requests are left"
            time.sleep(0.01)

    def alone(self, *requests: Request) -> list[Completion]:
        """Return the completions of the same requests in a closed run."""
        assert self.offline is not None
        done = {e.id: e for e in self.offline.run(requests) if isinstance(e, Completion)}
        return [done[i] for i in range(len(requests))]


def no_scores(ids: tuple[int, ...]) -> PromptScores:
    """Return log-probabilities of -1, -2 and so on."""
    return PromptScores(ids, tuple(-float(i) for i in range(1, len(ids))), ())


def run_server(
    serving_model: ServingModel, engine: EngineProtocol, scorer: Any = None, **options: Any
) -> Iterator[Live]:
    metrics = Metrics(serving_model.names[0])
    open_engine = OpenEngine(
        engine, observer=metrics, max_waiting=serving_model.settings.max_waiting, **options
    )
    bound = bind("127.0.0.1", 0)
    config = uvicorn.Config(
        make_app(serving_model, open_engine, scorer or no_scores, metrics),
        log_config=None,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    host, port = bound.getsockname()[:2]
    with httpx.Client(base_url=f"http://{host}:{port}", timeout=30) as client:
        yield Live(client, open_engine, serving_model, engine)
        if isinstance(engine, FakeEngine):
            engine.gate.set()
        open_engine.close(20)
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[jaxspec.Pair, Tokenizer]:
    path = tmp_path_factory.mktemp("served")
    tiny.write_target(path / "target")
    tiny.write_drafter(path / "drafter")
    pair = jaxspec.load(str(path / "target"), str(path / "drafter"))
    return pair, pair.tokenizer


@pytest.fixture(scope="session")
def serving_model(model: tuple[jaxspec.Pair, Tokenizer]) -> ServingModel:
    pair, tokenizer = model
    engine = Engine(*pair, program_features=FEATURES, cache_length=CACHE_LENGTH)
    return ServingModel(
        names=("tiny", "alias"),
        tokenizer=tokenizer,
        spec=engine.spec,
        generation=pair.target.generation or GenerationDefaults(),
        cache_length=CACHE_LENGTH,
        settings=Settings(max_n=8),
        grammars=pair.grammar_tokens if GRAMMARS else None,
    )


@pytest.fixture(scope="session")
def live(model: tuple[jaxspec.Pair, Tokenizer], serving_model: ServingModel) -> Iterator[Live]:
    """The tiny pair, and an engine of the same programs beside it."""
    pair, _ = model
    shared: dict[str, Any] = dict(
        program_features=FEATURES,
        batch_size=SLOTS,
        cache_length=CACHE_LENGTH,
        steps_per_return=2,
        programs=Programs(),
    )
    offline = Engine(*pair, **shared)
    scorer = PromptScorer(pair.target, FEATURES.top_logprobs)
    for started in run_server(serving_model, Engine(*pair, **shared), scorer):
        yield dataclasses.replace(started, offline=offline)


@pytest.fixture
def fake(serving_model: ServingModel) -> Iterator[Callable[..., Live]]:
    """Starts a server over an engine without a model; keywords are settings."""
    running: list[Iterator[Live]] = []

    def start(engine: FakeEngine | None = None, **settings: Any) -> Live:
        changed = dataclasses.replace(serving_model, settings=Settings(**settings))
        running.append(run_server(changed, engine or FakeEngine()))
        return next(running[-1])

    yield start
    for server in running:
        for _ in server:
            pass


@pytest.fixture
def scripted(serving_model: ServingModel) -> Iterator[Callable[..., tuple[Live, ScriptedEngine]]]:
    """Starts a server with Qwen3's chat format and these replies; keywords are settings."""
    tokenizer = Tokenizer(QWEN.tokenizer.backend, chat_template=CHAT_TEMPLATE)
    running: list[Iterator[Live]] = []

    def start(*replies: str, **settings: Any) -> tuple[Live, ScriptedEngine]:
        engine = ScriptedEngine(map(QWEN.encode, replies))
        changed = dataclasses.replace(
            serving_model,
            names=("scripted", "tiny"),
            tokenizer=tokenizer,
            grammars=None,  # which are of the other tokenizer
            settings=Settings(**settings),
        )
        running.append(run_server(changed, engine))
        return next(running[-1]), engine

    yield start
    for server in running:
        for _ in server:
            pass


def connect(live: Live) -> socket.socket:
    """Return a socket that is connected to the server."""
    url = live.client.base_url
    return socket.create_connection((url.host, url.port), timeout=20)
