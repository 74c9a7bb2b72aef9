"""accelerate's ``save_state`` and ``load_state``: the tag is always ``pytorch_model``."""

from __future__ import annotations

from pathlib import Path

from nvme_resume import last_resumable
from tests.huggingface import runs


def test_resumes_exactly(tmp_path: Path) -> None:
    program = "tests.huggingface.accelerate_program"
    whole, _ = runs.run(tmp_path, "whole", 2, program=program, steps=8)
    log = (tmp_path / "log-whole.0.txt").read_text()  # all of it
    out = tmp_path / "out"
    assert last_resumable(out) == out / "pytorch_model"
    assert log.count(f"committed {out}/pytorch_model") == 2
    resumed, _ = runs.run(tmp_path, "resumed", 2, program=program, steps=8, seed=2, resume=True)
    assert len(whole["losses"]) == 8 and resumed["losses"] == whole["losses"][4:]
