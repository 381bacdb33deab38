"""The bundled pair in numbers: both configs, the text it is trained on, and the training schedules."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.configs.dflash import DFlashConfig
from jaxspec.configs.gemma4 import Gemma4Config
from jaxspec.configs.mtp import MTPConfig
from jaxspec.training.objectives import LossWeights
from jaxspec.training.options import TrainingOptions

PYTHON = "3.11.7"
SEED = 20240401
SPECIALS = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")  # ids 0 to 4, as Gemma's
PAD, EOS, BOS, UNK, MASK = range(5)

HERE = Path(__file__).parent
BUNDLED = HERE.parents[1] / "jaxspec" / "bundled"
MANIFEST = HERE / "manifest.txt"
HELD_OUT = BUNDLED / "held_out.json"

TARGET = Gemma4Config(
    vocab_size=3072,
    hidden_size=192,
    layer_types=("sliding", "sliding", "sliding", "full") * 2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    full_num_kv_heads=1,
    full_head_dim=64,
    intermediate_size=416,
    sliding_window=128,
    max_positions=2048,
    k_eq_v=True,
)

DFLASH = DFlashConfig(
    vocab_size=TARGET.vocab_size,
    hidden_size=TARGET.hidden_size,
    layer_types=("sliding", "full"),
    causal=(True, False),
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=384,
    block_size=8,
    mask_token_id=MASK,
    feature_layers=(1, 4, 6),
    num_target_layers=TARGET.num_layers,
    max_positions=TARGET.max_positions,
    sliding_window=128,
    final_logit_softcap=30.0,
)

MTP = MTPConfig(
    vocab_size=TARGET.vocab_size,
    hidden_size=128,
    backbone_hidden_size=TARGET.hidden_size,
    layer_types=("sliding", "sliding", "sliding", "full"),
    num_heads=4,
    num_kv_heads=TARGET.num_kv_heads,
    head_dim=TARGET.head_dim,
    full_num_kv_heads=TARGET.full_num_kv_heads,
    full_head_dim=TARGET.full_head_dim,
    intermediate_size=256,
    sliding_window=TARGET.sliding_window,
    max_positions=TARGET.max_positions,
)


@dataclass(frozen=True)
class Phase:
    """A stretch of target training with crops of one length."""

    steps: int
    rows: int
    length: int


@dataclass(frozen=True)
class TargetSchedule:
    """AdamW with a warm-up and a linear decay to zero over all phases."""

    phases: tuple[Phase, ...]
    peak_rate: float = 3e-3
    weight_decay: float = 0.1
    warmup_steps: int = 300
    library_share: float = 0.5  # of the crops; tests are the larger part of the text


@dataclass(frozen=True)
class RefineSchedule:
    """Each step: greedy text of the target's own, texts it sampled at the round's start, and real text."""

    steps: int
    steps_a_round: int = 50
    sequences: int = 4096  # sampled a round; the best quarter is trained on
    temperature: float = 0.7
    common_share: float = 0.01
    prompt_length: int = 64
    new_tokens: int = 160
    greedy_rows: int = 128
    repeat_weight: float = 0.3
    best_rows: int = 64
    best_weight: float = 0.5
    real_rows: int = 32
    real_length: int = 512
    peak_rate: float = 5e-4
    weight_decay: float = 0.1
    warmup_steps: int = 20


@dataclass(frozen=True)
class DrafterSchedule:
    """Training of a drafter on text that the target itself wrote after prompts from the training text."""

    sequences: int  # a quarter of them sampled at temperature 1, the others greedy
    training: TrainingOptions
    weights: LossWeights
    prompt_lengths: tuple[int, int] = (64, 512)
    new_tokens: int = 256
    evaluations: int = 8


TARGET_SCHEDULES = {
    "smoke": TargetSchedule((Phase(6, 4, 64), Phase(2, 1, 128)), warmup_steps=2),
    "full": TargetSchedule((Phase(3000, 64, 512), Phase(150, 16, 2048))),
}
REFINE_SCHEDULES = {
    "smoke": RefineSchedule(
        steps=2,
        steps_a_round=1,
        sequences=8,
        prompt_length=16,
        new_tokens=24,
        greedy_rows=2,
        best_rows=2,
        real_rows=2,
        real_length=64,
        warmup_steps=1,
    ),
    "full": RefineSchedule(steps=400),
}
_SMOKE = TrainingOptions(steps=6, rows=4, anchors=4, warmup=0.3)
_DFLASH = TrainingOptions(
    steps=48_400,
    rows=64,
    anchors=48,
    learning_rate=2e-3,
    warmup=0.02,
    weight_decay=0.05,
    seed=SEED,
)
_MTP = TrainingOptions(
    steps=35_400, rows=64, anchors=32, learning_rate=3e-3, warmup=0.02, weight_decay=0.05, seed=SEED
)
_SHORT: Any = dict(sequences=8, new_tokens=24, evaluations=2)
_OF_DFLASH = LossWeights(decay=4.0, survival=0.8)
_OF_MTP = LossWeights(decay=4.5, survival=0.8)
DRAFTER_SCHEDULES = {
    "smoke": DrafterSchedule(
        training=_SMOKE, weights=_OF_DFLASH, prompt_lengths=(16, 32), **_SHORT
    ),
    "full": DrafterSchedule(131_072, _DFLASH, _OF_DFLASH),
}
ASSISTANT_SCHEDULES = {
    "smoke": DrafterSchedule(training=_SMOKE, weights=_OF_MTP, prompt_lengths=(16, 16), **_SHORT),
    "full": DrafterSchedule(131_072, _MTP, _OF_MTP),
}
