"""Run all of it and print the counts: `python -m tests.tools.fuzzing [--all] [kind ...]`."""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path

from tests.tools.fuzzing import configs, headers, images, jsonl, messages
from tests.tools.fuzzing.outcomes import GOOD, table

KINDS = {
    "configs": (configs.fuzz, 1000),
    "headers": (headers.fuzz, 500),
    "images": (images.fuzz, 500),
    "jsonl": (jsonl.fuzz, 500),
    "messages": (messages.fuzz, 500),
}


def main(arguments: list[str]) -> None:
    show_all = "--all" in arguments
    for name in [a for a in arguments if a in KINDS] or KINDS:
        fuzz, count = KINDS[name]
        begin, cases = time.perf_counter(), []
        with tempfile.TemporaryDirectory() as directory:
            for case in fuzz(Path(directory), count):
                cases.append(case)
                if show_all or case.outcome not in GOOD:
                    print(str(case).encode("utf-8", "replace").decode()[:400], flush=True)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        print(
            f"== {name}: {len(cases)} files, {table(cases)}; {time.perf_counter() - begin:.0f} s, "
            f"peak {peak} MB",
            flush=True,
        )


main(sys.argv[1:])
