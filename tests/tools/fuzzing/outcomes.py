"""What became of a mutated file: a clean refusal, a run that is right, or a fault of ours."""

from __future__ import annotations

import enum
import resource
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

MOST_SECONDS = (
    20.0  # on a busy machine; the slowest cases build the abstract shapes of 1,000 layers
)
MOST_MEGABYTES = 200  # that a case may add to the peak of the process
MOST_MESSAGE = 4000  # characters


class Outcome(enum.StrEnum):
    """The first two are what must come; the others are faults."""

    REFUSED = "refused"
    RIGHT = "right"
    TRACEBACK = "traceback"  # an error that is not documented
    VAGUE = "vague"  # a refusal that names neither what was wrong nor where
    NONSENSE = "nonsense accepted"
    MISREAD = "misread"  # accepted, and something else than what the file says
    WARNED = "warned"
    SLOW = "slow"
    LARGE = "took much memory"


GOOD = (Outcome.REFUSED, Outcome.RIGHT)


@dataclass(frozen=True)
class Case:
    """One mutated file.

    Attributes:
      what: the file and the mutation, in words.
      said: the refusal, or what is wrong with an accepted file.
    """

    what: str
    outcome: Outcome
    said: str = ""

    def __str__(self) -> str:
        return f"{self.outcome}: {self.what}: {self.said}"


class Fault(Exception):
    """An accepted file that should not have been, or that was read wrongly."""

    def __init__(self, outcome: Outcome, said: str):
        self.outcome = outcome
        super().__init__(said)


def judge(
    what: str,
    run: Callable[[], Any],
    *,
    documented: tuple[type[Exception], ...],
    names: Iterable[str],
    places: Iterable[str],
) -> Case:
    """Run one case.

    Args:
      run: reads the file. It raises `Fault` if it read something that it should not have.
      documented: the errors that a reader may raise.
      names: a refusal has to hold one of these: the field, say.
      places: and one of these: the file, say.
    """
    begin, memory = time.perf_counter(), _peak_megabytes()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        case = _run(what, run, documented, tuple(names), tuple(places))
    if warned and case.outcome in GOOD:
        case = Case(what, Outcome.WARNED, str(warned[0].message))
    took = time.perf_counter() - begin
    if took > MOST_SECONDS and case.outcome in GOOD:
        case = Case(what, Outcome.SLOW, f"{took:.1f} s")
    if (more := _peak_megabytes() - memory) > MOST_MEGABYTES and case.outcome in GOOD:
        case = Case(what, Outcome.LARGE, f"{more} MB")
    return case


def _peak_megabytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def _run(
    what: str,
    run: Callable[[], Any],
    documented: tuple[type[Exception], ...],
    names: tuple[str, ...],
    places: tuple[str, ...],
) -> Case:
    try:
        run()
    except Fault as fault:
        return Case(what, fault.outcome, str(fault))
    except documented as error:
        said = str(error)
        if not any(n in said for n in names) or not any(p in said for p in places):
            return Case(what, Outcome.VAGUE, said[:200])
        if len(said) > MOST_MESSAGE:
            return Case(what, Outcome.VAGUE, f"{len(said)} characters: {said[:100]}")
        return Case(what, Outcome.REFUSED, said)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {str(error)[:100]} ({last.filename.split('/')[-1]}:{last.lineno})"
        return Case(what, Outcome.TRACEBACK, said)
    return Case(what, Outcome.RIGHT)


def table(cases: Iterable[Case]) -> str:
    """Return the counts of all outcomes, in one line."""
    counts = Counter(case.outcome for case in cases)
    return ", ".join(f"{counts[o]} {o}" for o in Outcome if counts[o] or o in GOOD)
