"""Which checkpoint folder is loaded, and which go."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvme_resume.huggingface import choice, rotation

NAMES = st.sets(st.integers(0, 30), max_size=8).map(lambda steps: {f"checkpoint-{s}" for s in steps})


@given(NAMES, st.integers(1, 5), st.sets(st.integers(0, 30), max_size=2))
def test_rotation(names: set[str], limit: int, steps: set[int]) -> None:
    protected = {f"checkpoint-{s}" for s in steps}
    gone = rotation.outdated(names, limit, protected)
    left = names - set(gone)
    assert not protected & set(gone)
    assert len(left) == min(len(names), max(limit, len(names & protected)))
    free = [rotation.step_of(n) or 0 for n in left - protected]
    assert all((rotation.step_of(n) or 0) < min(free, default=99) for n in gone)


def test_rotation_is_by_number_and_may_be_off() -> None:
    names = ["checkpoint-9", "checkpoint-10", "checkpoint-100", "checkpoint-x", "logs"]
    assert rotation.outdated(names, 1, ["checkpoint-100"]) == ["checkpoint-9", "checkpoint-10"]
    assert rotation.outdated(names, None, []) == rotation.outdated(names, 0, []) == []


def test_the_newest_complete_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("nvme_resume").propagate = True
    for step in (2, 4, 10, 12, 14):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (tmp_path / "checkpoint-14" / "checkpoint-is-incomplete.txt").touch()
    (tmp_path / "checkpoint-12" / "trainer_state.json").write_text("{")
    (tmp_path / "checkpoint-10" / "trainer_state.json").unlink()
    with caplog.at_level(logging.WARNING, "nvme_resume"):
        assert choice.newest(tmp_path) == tmp_path / "checkpoint-4"
    (line,) = [r.getMessage() for r in caplog.records]
    for skipped in (
        "checkpoint-14 (checkpoint-is-incomplete.txt",
        "checkpoint-12 (",
        "checkpoint-10 (no trainer_state",
    ):
        assert skipped in line
    assert "checkpoint-2" not in line


def test_none(tmp_path: Path) -> None:
    assert choice.newest(tmp_path / "absent") is None
    (tmp_path / "checkpoint-2").mkdir()
    assert choice.newest(tmp_path) is None


def test_a_swapped_part_that_is_not_whole(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-2"
    (folder / "global_step2" / "nvme_resume").mkdir(parents=True)
    (folder / "trainer_state.json").write_text("{}")
    (folder / "latest").write_text("global_step2")
    (folder / "global_step2" / "nvme_resume" / "rank00.json").write_text("{}")
    assert "manifest" in str(choice.problem_with(folder))
