"""A short soak; ``make soak`` is the long one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from soak import soak


@pytest.mark.slow
def test_eight_processes_tenants_kills_and_purges(tmp_path: Path) -> None:
    """``OSTINATO_SOAK_S=300`` makes it minutes."""
    total = soak(tmp_path / "tier", 8, float(os.environ.get("OSTINATO_SOAK_S", "12")), seed=7)
    assert total["killed"] >= 2
    assert total["stored"] > 100
    assert total["loaded"] > 100
    assert total["purged"] > 0
    # What a killed process left in a slot is never served, and is no damage.
    assert total["damaged"] == 0, total


def test_the_soak_can_be_run_by_hand() -> None:
    script = Path(__file__).with_name("soak.py")
    said = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=True)
    assert "--seconds" in said.stdout
