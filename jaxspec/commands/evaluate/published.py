"""Acceptance lengths that others published for a target and a drafter, to stand beside a result.

All count the bonus token. A pair is known by the last part of its hub ids, which is also the name of the
directory that most people keep it in.
"""

from __future__ import annotations

from dataclasses import dataclass

_SOURCES = {
    "dflash": ("DFlash paper, version 2, table 1", "H200, transformers"),
    "dspark": ("DSpark paper, arXiv 2607.05147, table 1", "not thinking"),
    "floors": ("vllm-project/vllm#43445", "floors of a test"),
    "gemma": ("vllm-project/vllm#41703", "thinking, B200, 32 at a time"),
    "sglang": ("sgl-project/sglang#34524", "SGLang"),
}
_TASKS: tuple[str, ...] = ("gsm8k", "math500", "mbpp", "humaneval", "mt-bench", "alpaca")

# Target, drafter, source, temperature, drafts, and a figure for each task; "-" is unknown.
_TABLE = """
Qwen3-4B            Qwen3-4B-DFlash-b16          dflash  0  15  6.53  7.84  6.09  6.64  4.35  -
Qwen3-4B            Qwen3-4B-DFlash-b16          dflash  1  15  6.00  6.67  5.66  6.04  4.07  -
Qwen3-8B            Qwen3-8B-DFlash-b16          dflash  0  15  6.54  7.87  5.95  6.50  4.24  -
Qwen3-8B            Qwen3-8B-DFlash-b16          dflash  1  15  5.98  6.40  5.21  5.52  3.80  -
Qwen3-8B            Qwen3-8B-DFlash-b16          floors  0  15  6.06  -     -     6.17  4.03  -
Qwen3-4B            dflash_qwen3_4b_block7       dspark  1   7  5.40  4.85  4.40  4.74  3.07  -
Qwen3-4B            dspark_qwen3_4b_block7       dspark  1   7  6.11  5.70  5.13  5.38  3.64  -
Qwen3-8B            dflash_qwen3_8b_block7       dspark  1   7  5.33  4.91  4.36  4.64  3.11  2.98
Qwen3-8B            dspark_qwen3_8b_block7       dspark  1   7  6.17  5.78  5.16  5.52  3.72  3.58
Qwen3-14B           dflash_qwen3_14b_block7      dspark  1   7  5.41  4.84  4.44  4.59  3.10  -
Qwen3-14B           dspark_qwen3_14b_block7      dspark  1   7  6.21  5.74  5.26  5.43  3.70  -
gemma-4-12B-it      dflash_gemma4_12b_block7     dspark  1   7  5.45  5.04  4.39  4.95  2.98  2.84
gemma-4-12B-it      dspark_gemma4_12b_block7     dspark  1   7  6.05  5.78  5.11  5.64  3.49  3.35
gemma-4-26B-A4B-it  gemma-4-26B-A4B-it-DFlash    gemma   0  15  -     -     -     7.73  4.25  -
gemma-4-26B-A4B-it  gemma-4-26B-A4B-it-assistant gemma   0  15  -     -     -     7.95  4.83  -
gemma-4-31B-it      gemma-4-31B-it-DFlash        sglang  -  15  5.62  -     -     -     -     -
"""


@dataclass(frozen=True)
class Published:
    """A published acceptance length.

    Attributes:
      temperature: None where the source does not tell.
      conditions: what else is known of the measurement.
    """

    acceptance_length: float
    temperature: float | None
    num_draft_tokens: int
    conditions: str
    source: str


def published_for(target: str, drafter: str, task: str) -> tuple[Published, ...]:
    """Return what is known of a pair and a task.

    Args:
      target, drafter: hub ids or directories.
    """
    made = []
    for line in _TABLE.strip().splitlines():
        of_target, of_drafter, key, temperature, drafts, *figures = line.split()
        value = _number(dict(zip(_TASKS, figures, strict=True)).get(task, "-"))
        same = (_name(target), _name(drafter)) == (_name(of_target), _name(of_drafter))
        if same and value is not None:
            source, conditions = _SOURCES[key]
            made.append(Published(value, _number(temperature), int(drafts), conditions, source))
    return tuple(made)


def _number(text: str) -> float | None:
    return None if text == "-" else float(text)


def _name(source: str) -> str:
    return source.rstrip("/").rpartition("/")[2].lower()
