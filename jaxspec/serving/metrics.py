"""Metrics of a server, under vLLM's names where it has them. Dashboards made for vLLM read them."""

from __future__ import annotations

import collections
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from jaxspec.engine.request import Completion
from jaxspec.serving.handle import Handle
from jaxspec.text.chat import Parser

_SHORT_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10)
_LONG_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 600)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class RepeatedHistogram(Collector):
    """A histogram that counts a value many times at once. prometheus_client has none.

    Only one thread may write to it.
    """

    def __init__(self, name: str, help: str, model: str, buckets: tuple[float, ...]):
        self._name, self._help, self._model, self._buckets = name, help, model, buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int) -> None:
        """Count a value `times` times."""
        self._counts[bisect_left(self._buckets, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the histogram for a registry."""
        rows, total = [], 0
        for edge, count in zip((*self._buckets, float("inf")), self._counts, strict=True):
            total += count
            rows.append((floatToGoString(edge), total))
        family = HistogramMetricFamily(self._name, self._help, labels=["model_name"])
        family.add_metric([self._model], rows, self._sum)
        yield family


class Metrics:
    """Observer of an `OpenEngine` that counts tokens and requests."""

    def __init__(self, model: str):
        self._registry = CollectorRegistry()
        self._model = model

        def make(kind: Any, name: str, help: str, *labels: str, **more: Any) -> Any:
            names = ["model_name", *labels]
            made = kind(f"vllm:{name}", help, names, registry=self._registry, **more)
            return made if labels else made.labels(model)

        self.running = make(Gauge, "num_requests_running", "Requests that have a slot.")
        self.waiting = make(Gauge, "num_requests_waiting", "Requests that wait for a slot.")
        self.cache_usage = make(Gauge, "kv_cache_usage_perc", "Caches in use, 1 for all.")
        self.preemptions = make(Counter, "num_preemptions", "Requests that gave up their pages.")
        self._known_preemptions = 0
        self.prompt_tokens = make(Counter, "prompt_tokens", "Prompt tokens read.")
        self.generation_tokens = make(Counter, "generation_tokens", "New tokens.")
        self.queries = make(Counter, "prefix_cache_queries", "Prompt tokens looked up.")
        self.hits = make(Counter, "prefix_cache_hits", "Prompt tokens found in the cache.")
        self.done_by = make(
            Counter, "request_success", "Requests done, by reason.", "finished_reason"
        )
        self.num_drafts = make(Counter, "spec_decode_num_drafts", "Verify steps.")
        self.drafted = make(Counter, "spec_decode_num_draft_tokens", "Tokens drafted.")
        self.accepted = make(Counter, "spec_decode_num_accepted_tokens", "Drafts accepted.")
        self.accepted_at = make(
            Counter,
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafts accepted, by position.",
            "position",
        )
        self.steps_by_length = Counter(
            "jaxspec:verify_steps",
            "Steps of a row, by the drafts that each verified; 0: plain decoding.",
            ["model_name", "draft_length"],
            registry=self._registry,
        )
        self.calls = Counter(
            "jaxspec:tool_calls",
            "Tool calls of the model, by outcome. Broken ones could not be read and became text.",
            ["model_name", "outcome"],
            registry=self._registry,
        )
        self.first_token = make(
            Histogram,
            "time_to_first_token_seconds",
            "From submission to the first token.",
            buckets=(*_SHORT_S, 20, 40, 80),
        )
        self.inter_token = RepeatedHistogram(
            "vllm:inter_token_latency_seconds",
            "Between two tokens; those that come together share their time.",
            model,
            _SHORT_S,
        )
        self._registry.register(self.inter_token)
        self.latency = make(
            Histogram,
            "e2e_request_latency_seconds",
            "From submission to the last token.",
            buckets=_LONG_S,
        )
        self.prompt_sizes = make(
            Histogram, "request_prompt_tokens", "Prompt tokens of a request.", buckets=_TOKENS
        )
        self.reply_sizes = make(
            Histogram, "request_generation_tokens", "New tokens of a request.", buckets=_TOKENS
        )

    def new_tokens(self, handle: Handle, count: int, since_s: float | None) -> None:
        """Count new tokens of a request."""
        self.generation_tokens.inc(count)
        if since_s is not None:
            self.inter_token.observe(since_s / count, count)

    def done(self, handle: Handle, completion: Completion) -> None:
        """Count a request that is done."""
        prompt, lengths = len(handle.request.prompt_ids), completion.acceptance_lengths
        self.done_by.labels(self._model, completion.finish_reason).inc()
        if handle.first_token_s is None:
            return
        self.first_token.observe(handle.first_token_s)
        self.latency.observe(handle.last_s - handle.submitted_s)
        self.prompt_tokens.inc(prompt)
        self.queries.inc(prompt)
        self.hits.inc(completion.cached_tokens)
        self.prompt_sizes.observe(prompt)
        self.reply_sizes.observe(len(completion.token_ids))
        for length, count in collections.Counter(completion.verify_lengths).items():
            self.steps_by_length.labels(self._model, str(length)).inc(count)
        # Steps that verify no draft are those of plain decoding.
        if drafted := [count for count in completion.verify_lengths if count]:
            self.num_drafts.inc(len(drafted))
            self.drafted.inc(sum(drafted))
            self.accepted.inc(sum(lengths) - len(lengths))
            for position in range(max(lengths, default=1) - 1):
                count = sum(length - 1 > position for length in lengths)
                self.accepted_at.labels(self._model, str(position)).inc(count)

    def tool_calls(self, parser: Parser) -> None:
        """Count the tool calls of a reply."""
        outcomes = {
            "complete": parser.complete_calls - parser.repaired_calls,
            "repaired": parser.repaired_calls,
            "broken": parser.broken_calls,
        }
        for outcome, count in outcomes.items():
            self.calls.labels(self._model, outcome).inc(count)

    def text(self, running: int, waiting: int, cache_usage: float, preemptions: int) -> bytes:
        """Return all counts in the text form that Prometheus reads.

        Args:
          cache_usage: the share of the caches that requests have.
          preemptions: of the engine so far.
        """
        self.running.set(running)
        self.waiting.set(waiting)
        self.cache_usage.set(cache_usage)
        self.preemptions.inc(preemptions - self._known_preemptions)
        self._known_preemptions = preemptions
        return generate_latest(self._registry)
