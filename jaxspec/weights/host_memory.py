"""The memory that this process can still take from its machine. Read `available_memory`.

Three things limit it, and the least of them counts:

- the machine: `MemAvailable`, which is free memory and what the kernel would give back, and free swap;
- the control groups of this process (versions 1 and 2), which containers and job schedulers use: their limit less
  their usage, page cache not counted as usage, and the swap that they allow;
- `ulimit -v` and `ulimit -d`: their limit less what this process has already.

Page cache is memory that the kernel gives to whoever needs it, so it counts as free. All is read from `/proc` and
`/sys`, as Linux has them. Elsewhere nothing is known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class AvailableMemory:
    """Memory that this process can still take, in bytes, and the limit that it comes from.

    Attributes:
      where: the owner of this memory, as the subject of a sentence.
      way_out: how to get more.
    """

    nbytes: int
    where: str
    way_out: str


def available_memory(root: Path = Path("/")) -> AvailableMemory | None:
    """Return the least of what limits this process, or None where the system does not tell.

    Args:
      root: the directory with `proc` and `sys`.
    """
    limits = [*_of_machine(root), *_of_control_groups(root), *_of_limits(root)]
    return min(limits, key=lambda limit: limit.nbytes, default=None)


def _of_machine(root: Path) -> Iterator[AvailableMemory]:
    info = _sizes(root / "proc/meminfo")
    if "MemAvailable" in info:
        yield AvailableMemory(
            info["MemAvailable"] + info.get("SwapFree", 0),
            "this machine (page cache and swap counted as free)",
            "take a machine with more memory",
        )


def _of_control_groups(root: Path) -> Iterator[AvailableMemory]:
    """Yield the memory that each control group of this process leaves, from its own to the root of the tree."""
    swap_free = _sizes(root / "proc/meminfo").get("SwapFree", 0)
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        mount, left = (
            (root / "sys/fs/cgroup", _left_v2)
            if controllers == ""
            else (root / "sys/fs/cgroup/memory", _left_v1)
        )
        own = mount / path.strip("/")  # a container may see its group as the root of the tree
        for group in (own, *own.parents):
            nbytes = left(group, swap_free)
            if nbytes is not None:
                yield AvailableMemory(
                    max(0, nbytes),
                    "this process's control group (page cache counted as free)",
                    "raise the memory limit of the container or job",
                )
            if group == mount:
                break


def _left_v2(group: Path, swap_free: int) -> int | None:
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")
    if limit is None or used is None:
        return None
    stat = _sizes(group / "memory.stat")
    swap_limit, swap_used = (
        _number(group / "memory.swap.max"),
        _number(group / "memory.swap.current"),
    )
    if swap_limit is not None:
        swap_free = min(swap_free, max(0, swap_limit - (swap_used or 0)))
    reclaimable = ("active_file", "inactive_file", "slab_reclaimable")
    return limit - used + sum(stat.get(name, 0) for name in reclaimable) + swap_free


def _left_v1(group: Path, swap_free: int) -> int | None:
    limit, used = _number(group / "memory.limit_in_bytes"), _number(group / "memory.usage_in_bytes")
    if limit is None or used is None:
        return None
    stat = _sizes(group / "memory.stat")
    both = _number(group / "memory.memsw.limit_in_bytes")  # of memory and swap together
    if both is not None:
        swap_free = min(swap_free, max(0, both - limit - stat.get("total_swap", 0)))
    reclaimable = ("total_active_file", "total_inactive_file")
    return limit - used + sum(stat.get(name, 0) for name in reclaimable) + swap_free


def _of_limits(root: Path) -> Iterator[AvailableMemory]:
    with contextlib.suppress(ImportError):  # Windows
        import resource

        status = _sizes(root / "proc/self/status")
        for kind, field, flag in (
            (resource.RLIMIT_AS, "VmSize", "-v"),
            (resource.RLIMIT_DATA, "VmData", "-d"),
        ):
            limit = resource.getrlimit(kind)[0]
            if limit != resource.RLIM_INFINITY and field in status:
                yield AvailableMemory(
                    max(0, limit - status[field]),
                    f"this process under its ulimit {flag}",
                    f"raise the limit: ulimit {flag} unlimited",
                )


def _sizes(file: Path) -> Mapping[str, int]:
    """Read lines of a name, a number and perhaps "kB"; return bytes by name."""
    sizes = {}
    for line in _text(file).splitlines():
        name, *value = line.replace(":", " ").split()
        if value and value[0].isdecimal():
            sizes[name] = int(value[0]) * (1024 if value[-1] == "kB" else 1)
    return sizes


def _number(file: Path) -> int | None:
    """Read a file with one number, or return None if there is none, or no limit ("max")."""
    text = _text(file).strip()
    return int(text) if text.isdecimal() else None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
