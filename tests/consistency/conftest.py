"""What all tests of the check need."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def repository_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes find the package and the test workloads, wherever pytest was started."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
