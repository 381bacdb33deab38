"""Every pair of `sabotage`: check catches it, and says what is wrong. Slow: half a minute a pair."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools import sabotage


def test_there_are_pairs_enough() -> None:
    names = [sabotage.pair_name(pair) for pair in sabotage.PAIRS]
    assert len(set(names)) == len(names) >= 40


@pytest.mark.slow
@pytest.mark.parametrize("pair", sabotage.PAIRS, ids=sabotage.pair_name)
@pytest.mark.usefixtures("invoke")
def test_a_damaged_pair(pair: sabotage.Sabotage, tmp_path: Path) -> None:
    outcome = sabotage.checked(pair, tmp_path)
    assert outcome.caught, outcome.said
    assert outcome.named, outcome.said
