"""`--dry-run`: the memory of a run, and how many requests fit, from configs alone. Read `Plan`."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from jaxspec.commands.options import UsageError
from jaxspec.commands.output import OutputOptions, write_line
from jaxspec.commands.prefixes import planned_bytes
from jaxspec.commands.startup import GPU_SHARE
from jaxspec.engine.engine import check_pages
from jaxspec.options import CacheTokens
from jaxspec.runtime import memory
from jaxspec.runtime.prefill import Shapes, ahead_on, slots_on
from jaxspec.runtime.runtime import cache_bucket
from jaxspec.state import DecodeSpec
from jaxspec.weights import memory as weight_memory
from jaxspec.weights.memory import format_gib

CARDS = {"24 GB": 22.5, "48 GB": 45.0, "80 GB": 79.6, "141 GB": 140.4}
"""GiB of an L4, an L40S, an H100 and an H200, as nvidia-smi shows them: less than their names say."""
LENGTHS = (1024, 4096, 16384, 65536)


@dataclass(frozen=True)
class Plan:
    """The shapes of a run whose models were loaded without weights.

    Attributes:
      rows: decoded together.
      read_ahead: rows beside them; None for the engine's choice.
      passes: whether an engine reads prompts, whose activations count. `bench` has none.
      max_prefill_tokens, invariant, cache_tokens: of the engine.
      prefix_gib: for stored prefixes; None for a share of what is left, see `planned_bytes`.
    """

    spec: DecodeSpec
    mesh: Mesh
    rows: int
    cache_length: int
    read_ahead: int | None = 0
    passes: bool = True
    max_prefill_tokens: int | None = None
    invariant: bool = False
    cache_tokens: CacheTokens = None
    prefix_gib: float | None = 0

    def __post_init__(self) -> None:
        """Refuse too few pages.

        Raises:
          FieldError: naming the option.
        """
        check_pages(self.spec, self.cache_length, self.cache_tokens, 0, self.mesh)

    def footprint(
        self, rows: int, length: int, read_ahead: int = 0, cache_tokens: int | None = None
    ) -> memory.Footprint:
        """Return what the run needs with so many rows of such a length, without stored prefixes."""
        sizes = self.spec, rows, length, self.mesh
        beside: dict[str, Any] = dict(read_ahead=read_ahead, cache_tokens=cache_tokens)
        return memory.footprint(*sizes, **beside, pass_tokens=self._pass_tokens(rows, length))

    def tokens_on(self, limit: int | None, read_ahead: int) -> int | None:
        """Return the tokens of pages on a device of so many bytes; None: rows are whole."""
        if self.cache_tokens != "auto":
            return self.cache_tokens
        rows, length = slots_on(self.mesh, self.rows), self.cache_length
        beside = dict(read_ahead=read_ahead, pass_tokens=self._pass_tokens(rows, length))
        beside["prefix_bytes"] = planned_bytes(self, self.prefix_gib, limit, is_short=True)
        sizes = self.spec, rows, length, self.mesh
        return memory.plan_cache_tokens(*sizes, limit=limit, **beside)

    def _pass_tokens(self, rows: int, length: int) -> int:
        shapes = Shapes.of(
            self.spec.target,
            rows,
            self.mesh,
            invariant=self.invariant,
            max_prefill_tokens=self.max_prefill_tokens,
        )
        return memory.largest_pass(self.spec, shapes, rows, length) if self.passes else 0

    @functools.cached_property
    def need(self) -> tuple[int, memory.Footprint]:
        """The rows that are read ahead, and what the run needs here.

        Raises:
          FieldError: `prefix_gib` holds no prefix of a whole slot.
        """
        rows, length = slots_on(self.mesh, self.rows), self.cache_length
        read_ahead = self.read_ahead and ahead_on(self.mesh, self.read_ahead)
        if read_ahead is None:
            sizes = self.spec, rows, length, self.mesh
            tokens = self._pass_tokens(rows, length)
            least = self.mesh.shape["data"] * length
            pages = least if self.cache_tokens == "auto" else self.cache_tokens
            read_ahead = memory.plan_read_ahead(*sizes, cache_tokens=pages, pass_tokens=tokens)
        limit = weight_memory.bytes_limit(self.mesh)
        tokens = self.tokens_on(limit, read_ahead)
        need = self.footprint(rows, length, read_ahead, tokens)
        left = None if limit is None else limit - need.total
        all_tokens = (rows + read_ahead) * length
        is_short = self.cache_tokens == "auto" and tokens is not None and tokens < all_tokens
        nbytes = planned_bytes(self, self.prefix_gib, left, is_short=is_short)
        return read_ahead, dataclasses.replace(need, prefixes=nbytes)

    def to_json(self) -> dict[str, Any]:
        """Return all numbers as JSON values. `fits` has null where the memory of a device is not known."""
        length, here, (read_ahead, need) = self.cache_length, self.mesh, self.need
        limit = weight_memory.bytes_limit(here)
        stored = 0 if self.prefix_gib is None else need.prefixes  # a share leaves rows their room

        def on(device: str, limit: int | None) -> dict[str, Any]:
            of: dict[str, Any] = dict(device=device, limit_bytes=limit)
            if limit is None:
                return of | dict(this_run=None, cache_tokens=None, rows_by_length=None)
            tokens = self.tokens_on(limit, read_ahead)
            least = self.footprint(slots_on(here, self.rows), length, read_ahead, tokens).total
            fits = least + stored <= limit
            of |= dict(this_run=fits, cache_tokens=tokens if fits else None)
            return of | dict(rows_by_length=self.most_rows(limit - stored, lengths))

        longest = self.spec.target.config.max_positions + self.spec.step_tokens
        lengths = sorted({length, *(n for n in LENGTHS if n <= longest)})
        limits = {f"here: {here.devices.flat[0].device_kind}": limit}
        limits |= {name: int(GPU_SHARE * gib * 2**30) for name, gib in CARDS.items()}
        return {
            "dtype": self.spec.target.dtypes,
            "drafter_dtype": self.spec.drafter and self.spec.drafter.dtypes,
            "mesh": dict(here.shape),
            "rows": slots_on(here, self.rows),
            "cache_length": length,
            "read_ahead": read_ahead,
            "cache_tokens": self.tokens_on(limit, read_ahead),
            "bytes_a_device": dataclasses.asdict(need) | {"total": need.total},
            "fits": [on(*device) for device in limits.items()],
        }

    def most_rows(self, limit: int, lengths: list[int]) -> dict[str, int]:
        """Return for each length how many rows of it fit, none of them read ahead."""
        data = self.mesh.shape["data"]

        def fits(count: int, length: int) -> bool:
            return self.footprint(data * count, length).total <= limit

        counts = {}
        for length in lengths:
            beyond = 1
            while fits(beyond, length):
                beyond *= 2
            counts[str(length)] = data * memory.largest(beyond, lambda n, at=length: fits(n, at))
        return counts


def show(plan: Plan, title: str, console: Console) -> dict[str, Any]:
    """Print the tables of a plan, and return them as JSON values."""
    values = plan.to_json()
    need, fits = values["bytes_a_device"], values["fits"]
    needs = Table("Memory of a device", "GiB")
    for name, nbytes in need.items():
        if nbytes:
            needs.add_row(name, format_gib(nbytes))
    lengths = list(fits[1]["rows_by_length"])
    rows = Table("Device", "GiB", "This run", *(f"{int(n):,}" for n in lengths))
    for device in fits:
        if device["limit_bytes"] is None:
            rows.add_row(device["device"], "?", "?", *("?" for _ in lengths))
            continue
        counts = [f"{device['rows_by_length'][n]:,}" for n in lengths]
        answer = "fits" if device["this_run"] else "does not fit"
        if device["cache_tokens"] is not None:
            answer += f", {device['cache_tokens']:,} tokens in pages"
        rows.add_row(device["device"], format_gib(device["limit_bytes"]), answer, *counts)
    run = f"This run: {values['rows']} rows of {values['cache_length']} positions"
    ahead = values["read_ahead"]
    run += f", and {ahead} rows that are read ahead" if ahead else ""
    if (tokens := values["cache_tokens"]) is not None:
        run += f", in pages for {tokens:,} tokens"
    counted = f"{run}. No weights were read.\n\nRows that fit, by their positions:"
    console.print(Group(Text(title, "bold"), needs, counted, rows), highlight=False)
    return {"dry_run": values}


def write(plan: Plan, title: str, json_path: str | None, *, overwrite: bool = True) -> None:
    """Print a plan, and write it to a file of JSON, or to standard output for "-".

    Raises:
      UsageError: the file exists and is not to be overwritten.
    """
    if json_path not in (None, "-") and Path(json_path).exists() and not overwrite:
        raise UsageError(f"--json {json_path} exists; name another file, or add --overwrite")
    output = OutputOptions(json_path)
    with output.opened() as file:
        values = show(plan, title, output.console)
        if file is not None:
            write_line(file, values)


def default_length(spec: DecodeSpec, length: int) -> int:
    """Return a length of caches for prompts that are not known: this one, or the model's if that is less."""
    return min(cache_bucket(length), spec.target.config.max_positions + spec.step_tokens)
