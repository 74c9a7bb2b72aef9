"""Ranks of one host share its disks."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvme_resume.errors import NoSpaceError
from nvme_resume.storage import room


def need(host: str, device: int, nbytes: int, free: int) -> dict[str, object]:
    return {"host": host, "device": device, "path": f"/{device}", "bytes": nbytes << 20, "free": free << 20}


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
        needs.add(tmp_path / name, 5)
    (found,) = needs.plain()
    assert found["bytes"] == 10 and found["free"] > 0
