"""Publishing: complete or absent, whatever call fails."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from nvme_resume import layout
from nvme_resume.storage import catalog, commit, records
from nvme_resume.storage import disk as seam
from tests.core.test_records import HEAD


class FailingDisk(seam.Disk):
    """Fails at the n-th call with an errno."""

    CALLS = ("write", "sync_file", "sync_folder", "rename", "exchange", "remove_tree")

    def __init__(self, fail_at: int, code: int) -> None:
        self.calls = 0
        self.fail_at = fail_at
        self.code = code

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in FailingDisk.CALLS:
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == self.fail_at:
                raise OSError(self.code, "injected", str(args[0]))
            return found(*args, **kwargs)

        return call


def stage(save_dir: Path, content: str) -> str:
    staging = layout.staging(HEAD.tag, HEAD.checkpoint_id)
    folder = save_dir / staging / layout.RECORDS
    folder.mkdir(parents=True)
    (save_dir / staging / "data").write_text(content)
    return staging


def content(save_dir: Path) -> str | None:
    tag = catalog.read_latest(save_dir)
    if tag is None:
        return None
    folder = save_dir / tag
    assert records.read_manifest(folder) == HEAD
    return (folder / "data").read_text()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_a_failure_at_any_call_leaves_the_old_checkpoint(tmp_path: Path, code: int) -> None:
    fail_at = 0
    while True:
        fail_at += 1
        save_dir = tmp_path / str(fail_at)
        save_dir.mkdir()
        commit.publish(save_dir, stage(save_dir, "old"), HEAD, save_latest=True)
        staging = stage(save_dir, "new")
        disk = FailingDisk(fail_at, code)
        failed = False
        with seam.replaced(disk):
            try:
                commit.publish(save_dir, staging, HEAD, save_latest=True)
            except OSError as error:
                assert error.errno == code
                failed = True
        if failed:
            assert content(save_dir) == "old"
            commit.discard(save_dir, staging, HEAD.checkpoint_id)
            assert catalog.leftovers(save_dir) == []
            continue
        assert content(save_dir) == "new"
        if disk.calls < fail_at:
            break
    assert fail_at > 6
    assert catalog.leftovers(save_dir) == []


def test_without_exchange_two_renames_do(tmp_path: Path) -> None:
    class Plain(seam.Disk):
        def exchange(self, one: Path, other: Path) -> bool:
            return False

    commit.publish(tmp_path, stage(tmp_path, "old"), HEAD, save_latest=True)
    with seam.replaced(Plain()):
        commit.publish(tmp_path, stage(tmp_path, "new"), HEAD, save_latest=True)
    assert content(tmp_path) == "new"
    assert catalog.leftovers(tmp_path) == []


def test_latest_moves_only_when_asked(tmp_path: Path) -> None:
    commit.publish(tmp_path, stage(tmp_path, "x"), HEAD, save_latest=False)
    assert catalog.read_latest(tmp_path) is None
    assert catalog.tags(tmp_path) == [HEAD.tag]


def test_a_crash_between_two_renames_is_mended(tmp_path: Path) -> None:
    commit.publish(tmp_path, stage(tmp_path, "old"), HEAD, save_latest=True)
    (tmp_path / HEAD.tag).rename(tmp_path / layout.retired(HEAD.tag, "x1"))
    assert commit.mend(tmp_path) == [HEAD.tag]
    assert commit.mend(tmp_path) == []
    assert content(tmp_path) == "old"
    (tmp_path / HEAD.tag).rename(tmp_path / layout.retired(HEAD.tag, "x1"))
    staging = stage(tmp_path, "new")
    assert [commit.recover(p) for p in catalog.leftovers(tmp_path)] == [f"put back as {HEAD.tag}", "removed"]
    assert content(tmp_path) == "old"
    assert not (tmp_path / staging).exists()


def test_a_replaced_checkpoint_of_plain_deepspeed_gets_its_name_back(tmp_path: Path) -> None:
    """It has no manifest, and it is the only copy."""
    (tmp_path / layout.retired("t", "x1")).mkdir()
    assert commit.mend(tmp_path) == ["t"]
    assert (tmp_path / "t").is_dir()


def test_a_half_written_save_is_discarded_with_its_seals(tmp_path: Path) -> None:
    staging = stage(tmp_path, "half")
    (tmp_path / staging / layout.seal(0)).write_text("{}")
    commit.discard(tmp_path, staging, HEAD.checkpoint_id)
    assert not (tmp_path / staging).exists()


def test_a_crash_before_latest_moved_leaves_a_file_that_goes(tmp_path: Path) -> None:
    commit.publish(tmp_path, stage(tmp_path, "old"), HEAD, save_latest=True)
    (tmp_path / f"{layout.STAGING_PREFIX}{layout.LATEST}.x1").write_text("half")
    assert [commit.recover(p) for p in catalog.leftovers(tmp_path)] == ["removed"]
    assert content(tmp_path) == "old"
