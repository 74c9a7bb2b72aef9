"""Rotation: by step, never what is needed, and whole or gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvme_resume import layout
from nvme_resume.storage import catalog, commit, prune
from nvme_resume.storage import disk as seam
from tests.storage.test_catalog import make


@pytest.fixture
def save_dir(tmp_path: Path) -> Path:
    """Steps out of the order of their making; ``latest`` names the one made last."""
    for step in (3, 10, 2, 7):
        make(tmp_path, f"t{step}", step)
    return tmp_path


def test_the_newest_by_step_stay(save_dir: Path) -> None:
    (save_dir / layout.LATEST).write_text("t10")
    assert prune.prune(save_dir, 2) == ["t2", "t3"]
    assert sorted(catalog.tags(save_dir)) == ["t10", "t7"]
    assert prune.prune(save_dir, 2) == []
    assert catalog.leftovers(save_dir) == []


def test_the_one_that_latest_names_stays(save_dir: Path) -> None:
    (save_dir / layout.LATEST).write_text("t2")
    assert prune.prune(save_dir, 1) == ["t3", "t7"]
    assert sorted(catalog.tags(save_dir)) == ["t10", "t2"]


def test_damaged_ones_do_not_count_and_stay(save_dir: Path) -> None:
    (save_dir / layout.LATEST).write_text("t10")
    (save_dir / "t10" / "model0.pt").unlink()
    assert prune.prune(save_dir, 1) == ["t2", "t3"]  # t7 is the last complete one
    assert sorted(catalog.tags(save_dir)) == ["t10", "t7"]


def test_what_others_wrote_stays(save_dir: Path) -> None:
    (save_dir / layout.LATEST).write_text("t10")
    (save_dir / "stock").mkdir()
    (save_dir / "stock" / "mp_rank_00_model_states.pt").touch()
    (save_dir / "runs").mkdir()
    prune.prune(save_dir, 1)
    assert (save_dir / "stock").is_dir() and (save_dir / "runs").is_dir()


def test_a_crash_in_the_middle_leaves_no_half_checkpoint(save_dir: Path) -> None:
    (save_dir / layout.LATEST).write_text("t10")

    class Crash(BaseException):
        pass

    class Dies(seam.Disk):
        def remove_tree(self, path: Path) -> None:
            (path / "model0.pt").unlink()
            raise Crash

    with seam.replaced(Dies()), pytest.raises(Crash):
        prune.prune(save_dir, 1)
    assert all(e.problem is None for e in catalog.entries(save_dir))
    (left,) = catalog.leftovers(save_dir)
    assert commit.recover(left) == "removed"
    assert sorted(catalog.tags(save_dir)) == ["t10", "t3", "t7"]


def test_keep_last_must_keep_one(save_dir: Path) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        prune.prune(save_dir, 0)
