"""Conversions that were killed, and two at once: nothing half written is taken for a checkpoint, nothing is left."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from checkpoints_convert.errors import CheckpointError
from jaxspec.weights import atomic_dir
from jaxspec.weights.atomic_dir import atomic_directory
from jaxspec.weights.conversion import convert, to_hf
from jaxspec.weights.loading import load_target
from tests.checkpoints_convert import hf_layout

ROOT = Path(__file__).parents[2]
TINY = hf_layout.TINY["31b"]

_WRITER = """
import pathlib, sys, time
from jaxspec.weights.atomic_dir import atomic_directory
with atomic_directory(pathlib.Path(sys.argv[1])) as (directory, _):
    (directory / "half").write_bytes(bytes(1000))
    print("writing", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    hf_layout.write(tmp_path / "hf", TINY, hf_layout.target_shapes(TINY))
    return tmp_path / "hf"


def started(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", *args], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def test_two_writers_do_not_meet_and_a_killed_one_is_followed(tmp_path: Path) -> None:
    place = tmp_path / "ours"
    with started(_WRITER, str(place), "60") as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        with (
            pytest.raises(
                CheckpointError, match=r"ours.partial is being written by another process"
            ),
            atomic_directory(place),
        ):
            pass
        assert names(tmp_path) == ["ours.partial", "ours.partial.lock"]
        writer.kill()
    assert names(tmp_path) == ["ours.partial", "ours.partial.lock"]
    with atomic_directory(place) as (directory, left_behind):
        assert left_behind == 1000
        assert names(directory) == []
        (directory / "whole").touch()
    assert names(tmp_path) == ["ours"]
    assert names(place) == ["whole"]


def test_the_second_of_two_writers_may_follow_a_first_that_failed(tmp_path: Path) -> None:
    place = tmp_path / "ours"
    with pytest.raises(RuntimeError), atomic_directory(place):
        raise RuntimeError
    assert names(tmp_path) == []
    with atomic_directory(place):
        pass
    assert names(tmp_path) == ["ours"]
    with pytest.raises(CheckpointError, match="exists"), atomic_directory(place):
        pass


def test_a_destination_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    place = tmp_path / "ours"
    with pytest.raises(CheckpointError, match="exists"), atomic_directory(place):
        place.mkdir()
    assert names(tmp_path) == ["ours"]


def test_an_abandoned_directory_is_not_put_in_its_place(tmp_path: Path) -> None:
    """Ctrl-C removes what another thread is writing, and that thread may just have finished."""
    place = tmp_path / "ours"

    def interrupted() -> None:
        with atomic_directory(place):
            atomic_dir.abandon()
            assert names(tmp_path) == []
            atomic_dir.partial(place).mkdir()  # it writes on

    with pytest.raises(CheckpointError, match="was abandoned"):
        interrupted()
    assert names(tmp_path) == []


def test_where_there_are_no_locks_the_file_is_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network file systems have none, so whether the last writer lives cannot be known: it is asked."""
    monkeypatch.setattr(atomic_dir, "_lock", lambda file: None)
    place = tmp_path / "ours"
    with (
        atomic_directory(place),
        pytest.raises(CheckpointError, match=r"no locks that tell .* if none does, remove both"),
        atomic_directory(place),
    ):
        pass
    assert names(tmp_path) == ["ours"]


_CONVERTER = """
import sys, time
from jaxspec.weights import conversion
from jaxspec.weights.conversion import convert, to_hf
def slowly(name, done, total):
    print("written", flush=True)
    time.sleep(0.2)
source, destination, way = sys.argv[1:]
(to_hf if way == "back" else convert)(source, destination, progress=slowly)
"""


def kill_and_repeat(source: Path, place: Path, way: str, after: int, later_s: float = 0.0) -> None:
    """Kill a conversion after some arrays; look at what it left; do it again."""
    again = to_hf if way == "back" else convert
    with started(_CONVERTER, str(source), str(place), way) as process:
        assert process.stdout is not None
        for _ in range(after):
            assert process.stdout.readline() == "written\n"
        time.sleep(later_s)
        process.kill()
    assert not place.exists()
    left = atomic_dir.partial(place)
    assert left.is_dir()
    with pytest.raises(CheckpointError):
        load_target(str(left), dtype="float32")
    assert again(source, place).left_behind > 0
    load_target(str(place), dtype="float32")
    assert not [p for p in place.parent.iterdir() if ".partial" in p.name]


def test_a_conversion_killed_half_way_is_followed_by_a_whole_one(
    source: Path, tmp_path: Path
) -> None:
    kill_and_repeat(source, tmp_path / "ours", "there", after=5)


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 2, 9, 20, 30])
@pytest.mark.parametrize("way", ["there", "back"])
def test_conversions_killed_at_other_moments(
    source: Path, tmp_path: Path, way: str, after: int
) -> None:
    if way == "back":
        source = convert(source, tmp_path / "converted").destination
    kill_and_repeat(source, tmp_path / "place", way, after, later_s=0.02 * after)
