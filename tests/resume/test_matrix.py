"""Bit equality over all pairs of settings (``make test-matrix``); a spread of them is in test_exact.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.resume.pairs import pairwise, sized

CASES = pairwise()


def label(case: dict[str, Any]) -> str:
    return "-".join(str(v) for v in case.values())


@pytest.mark.matrix
@pytest.mark.parametrize("case", CASES, ids=label)
def test_resume_equals_the_uninterrupted_run(tmp_path: Path, case: dict[str, Any]) -> None:
    settings = sized(case)
    scale = settings["accumulation"]
    harness.assert_equal_resume(
        tmp_path, settings.pop("ranks"), save_at=5 * scale, steps=10 * scale, **settings
    )
