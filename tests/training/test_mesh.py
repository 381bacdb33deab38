"""Training on a mesh says what one device says, and goes on exactly where it was killed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import slow
from tests.conftest import FAST_COMPILE


@pytest.mark.parametrize("case", ["dflash 2 1", *slow("dflash 2 2", "mtp 2 1")])
def test_a_mesh_trains_what_one_device_trains(case: str, tmp_path: Path) -> None:
    """Weights after two updates differ by rounding alone. The mesh is of DATA times MODEL devices."""
    _, data, model = case.split()
    flags = f"{FAST_COMPILE} --xla_force_host_platform_device_count=4"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.training.on_mesh", *case.split()]
    pipe = subprocess.PIPE
    done = subprocess.run(
        [*command, str(tmp_path)], env=environment, stdout=pipe, stderr=pipe, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("far") < 1e-2
    assert found.pop("far with features") < 1e-2
    for name in ("loss", "norm"):
        spread, alone = found.pop(name)
        assert spread == pytest.approx(alone, rel=1e-4)
    assert re.search("rows is 3, which 2 parts of a mesh do not divide", found.pop("refused"))
    assert found == {
        "devices": int(data) * int(model),
        "misplaced": [],
        "resumed_from": 2,
        "equal": True,
        "features": 1,
    }
