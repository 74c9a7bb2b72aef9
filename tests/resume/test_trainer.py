"""Case S1: Hugging Face ``Trainer``, ``resume_from_checkpoint=True``, a DeepSpeed configuration full of "auto"."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import harness


def run(
    tmp: Path, out: Path, name: str, ranks: int, seed: int, steps: int, *extra: str
) -> list[dict[str, Any]]:
    arguments = (str(out), str(tmp / f"nvme-{name}"), str(seed), str(steps), *extra)
    codes, logs = harness.launch(tmp, name, ranks, "tests.trainer_program", *arguments)
    assert codes == [0] * ranks, logs
    found: list[dict[str, Any]] = json.loads(Path(f"{out}.0.json").read_text())
    return found


@pytest.mark.parametrize(("ranks", "gather"), [(1, "gather"), (2, "no-gather")])
def test_trainer_resumes_exactly(tmp_path: Path, ranks: int, gather: str) -> None:
    """``no-gather``: the Trainer then saves the same DeepSpeed tag twice in one save (case C2)."""
    whole = run(tmp_path, tmp_path / "whole", "whole", ranks, 1, 6, gather)
    shutil.rmtree(tmp_path / "whole" / "checkpoint-6")
    resumed = run(tmp_path, tmp_path / "whole", "resumed", ranks, 1, 6, gather, "resume")
    assert [entry["step"] for entry in whole] == [1, 2, 3, 4, 5, 6]
    assert resumed[-3:] == whole[-3:]
    manifest = tmp_path / "whole" / "checkpoint-6" / "global_step6" / "nvme_resume" / "manifest.json"
    assert json.loads(manifest.read_text())["body"]["world_size"] == ranks
