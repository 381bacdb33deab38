"""A stream of requests through the engine: the trace that is published, and what is reported of a run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from jaxspec.commands.bench import run, trace
from jaxspec.commands.bench.options import TraceOptions
from jaxspec.commands.bench.trace import TraceRequest
from jaxspec.commands.cli import app
from jaxspec.commands.models import ModelOptions
from jaxspec.commands.options import UsageError
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from jaxspec.options import Drafting, Sampling
from jaxspec.runtime import memory
from jaxspec.weights.sharding import make_mesh
from tests.commands.test_bench import tiny_pair


def test_the_generated_trace_is_the_published_one() -> None:
    jobs = trace.generate(192, 7, None, 4096)
    assert sum(job.prompt_tokens for job in jobs) == 64_153
    assert sum(job.new_tokens for job in jobs) == 55_268
    assert {job.arrival_s for job in jobs} == {0.0}
    assert min(job.prompt_tokens for job in jobs) >= 32
    late = trace.generate(192, 7, 20.0, 4096)
    assert [job.prompt_tokens for job in late] == [job.prompt_tokens for job in jobs]
    assert 6 < late[-1].arrival_s < 14  # 192 at 20 a second
    short = trace.generate(192, 7, None, 600)
    assert max(job.prompt_tokens + job.new_tokens for job in short) == 600


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "trace.jsonl:2: Expecting"),
        ('{"prompt_tokens": 3}', "2: expected an object with prompt_tokens, new_tokens"),
        ('{"prompt_tokens": 3, "new_tokens": 2, "arrivals": 1}', "2: expected an object"),
        ('{"prompt_tokens": true, "new_tokens": 2}', "2: prompt_tokens is True"),
        ('{"prompt_tokens": 3, "new_tokens": 0}', "2: new_tokens is 0"),
        ('{"prompt_tokens": 3, "new_tokens": 2, "arrival_s": -1}', "2: arrival_s is -1"),
        ('{"prompt_tokens": 3, "new_tokens": 2, "arrival_s": NaN}', "2: arrival_s is nan"),
    ],
)
def test_a_trace_that_cannot_be_read(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"prompt_tokens": 3, "new_tokens": 2}\n' + line + "\n")
    with pytest.raises(UsageError, match=message):
        trace.read(path)


@pytest.mark.parametrize(
    ("command", "option"), [(("bench",), "--trace"), (("check", "bundled", "dflash"), "--text")]
)
def test_json_is_not_written_over_what_is_read(
    command: tuple[str, ...], option: str, tmp_path: Path
) -> None:
    path = tmp_path / "input"
    path.write_text('{"prompt_tokens": 3, "new_tokens": 2}')
    done = CliRunner().invoke(app, [*command, option, str(path), "--json", str(path)])
    assert done.exit_code == 2
    assert f"is the file of {option}, which would be lost" in done.stderr
    assert path.read_text() == '{"prompt_tokens": 3, "new_tokens": 2}'


def test_a_trace_of_a_file_comes_in_order(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    jobs = [TraceRequest(3, 2, 0.5), TraceRequest(4, 5, 0.25)]
    keys = ("prompt_tokens", "new_tokens", "arrival_s")
    lines = [
        dict(zip(keys, (j.prompt_tokens, j.new_tokens, j.arrival_s), strict=True)) for j in jobs
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert trace.read(path) == jobs[::-1]


def test_what_a_run_of_a_trace_reports(tmp_path: Path) -> None:
    pair = tiny_pair(synthetic_acceptance=2.0)
    engine = Engine(
        *pair.loaded,
        drafting=Drafting(3, synthetic_acceptance=2.0),
        batch_size=2,
        cache_length=64,
        steps_per_return=2,
        choose_length="never",
    )
    jobs = [
        TraceRequest(5, 9),
        TraceRequest(20, 1),
        TraceRequest(7, 12),
        TraceRequest(3, 6, 0.2),
        TraceRequest(40, 8, 0.3),
    ]
    requests = [
        Request((i + 5,) * job.prompt_tokens, job.new_tokens, id=i) for i, job in enumerate(jobs)
    ]
    report, moments = trace.run(engine, jobs, requests)
    assert report.new_tokens == sum(job.new_tokens for job in jobs)
    assert report.prompt_tokens == 75
    assert report.late_compilations == 0
    assert report.acceptance_length == pytest.approx(2.0, abs=0.5)
    parts = report.prefill_s + report.decode_s + report.host_s + report.idle_s
    assert parts == pytest.approx(report.wall_s)
    assert report.tokens_per_s == pytest.approx(report.new_tokens / report.wall_s)
    assert list(report.ttft_ms) == list(report.tpot_ms) == ["p50", "p95", "p99", "max"]
    assert 0 < report.slots_in_use <= 2
    assert report.preemptions == engine.num_preemptions
    assert report.cache_tokens == 2 * 64
    assert moments[-1].running == moments[-1].waiting == 0
    assert np.all(np.diff([m.tokens for m in moments]) >= 0)
    console = Console(width=80, record=True)
    console.print(trace.render(report))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    values = trace.to_json(report, moments)
    assert json.loads(json.dumps(values, allow_nan=False))["requests"] == 5
    pytest.importorskip("matplotlib")
    trace.draw(report, moments, "a trace", tmp_path / "trace.png")
    assert (tmp_path / "trace.png").stat().st_size > 10_000


def test_slots_with_pages_may_be_longer_than_memory_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of 32,768 tokens beside 63 short ones was refused, as if all slots had that length."""
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"prompt_tokens": 5, "new_tokens": 2}\n{"prompt_tokens": 900, "new_tokens": 9}'
    )
    options = TraceOptions(trace=str(path), slots=64)
    of_pair: Any = (ModelOptions(), Drafting(), Sampling())
    pair, _, length = run._traced(*of_pair, options, None, 0)
    mesh = make_mesh(devices=jax.devices()[:1])
    limit = memory.footprint(pair.spec, 16, length, mesh).total
    monkeypatch.setattr("jaxspec.weights.memory.bytes_limit", lambda mesh: limit)
    with pytest.raises(memory.DeviceMemoryError, match="64 rows with caches"):
        run._traced(*of_pair, options, None, 0)
    paged = dataclasses.replace(options, cache_tokens="2048")
    assert run._traced(*of_pair, paged, None, 0)[2] == length
