"""Ranks of one host share its disks."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvme_resume.errors import NoSpaceError, StorageError
from nvme_resume.storage import disk as seam
from nvme_resume.storage import room


def need(host: str, device: int, nbytes: int, free: int, inodes: int | None = None) -> dict[str, object]:
    return {
        "host": host,
        "device": device,
        "path": f"/{device}",
        "bytes": nbytes << 20,
        "free": free << 20,
        "files": 10,
        "free_files": inodes,
    }


def test_what_each_rank_could_have_may_be_too_much_for_all() -> None:
    ranks = [[need("a", 1, 140, 225)], [need("a", 1, 140, 225)]]
    room.refuse_too_little(ranks[:1], "x", tag="t")
    with pytest.raises(NoSpaceError) as caught:
        room.refuse_too_little(ranks, "x", tag="t")
    assert "no room for x" in str(caught.value)
    assert "280 MiB free for 2 ranks of a" in str(caught.value) and "225 MiB" in str(caught.value)


def test_other_hosts_and_other_disks_do_not_count() -> None:
    ranks = [[need("a", 1, 140, 225), need("a", 2, 140, 225)], [need("b", 1, 140, 225)]]
    room.refuse_too_little(ranks, "x", tag="t")


def test_folders_on_one_file_system_are_added_up(tmp_path: Path) -> None:
    needs = room.Needs("h")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        needs.add(tmp_path / name, 5, 2)
    (found,) = needs.plain()
    assert found["bytes"] == 10 and found["free"] > 0 and found["files"] == 4


def test_inodes_run_out_too() -> None:
    ranks = [[need("a", 1, 1, 225, 19)], [need("a", 1, 1, 225, 19)]]
    room.refuse_too_little(ranks[:1], "x", tag="t")
    with pytest.raises(NoSpaceError, match=r"too few inodes for x .*20 free for 2 ranks of a, found 19"):
        room.refuse_too_little(ranks, "x", tag="t")


def test_a_folder_that_may_not_be_written_to_is_named(tmp_path: Path) -> None:
    class ReadOnly(seam.Disk):
        def writable(self, path: Path) -> bool:
            return False

    with seam.replaced(ReadOnly()), pytest.raises(StorageError, match="may not write here") as caught:
        room.Needs("h").add(tmp_path, 1, 1)
    assert caught.value.path == str(tmp_path)
