"""A rank that is lost in the middle of a save: the others get a named error in time, and nothing is committed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from nvme_resume import last_resumable, layout
from nvme_resume.storage import audit
from tests import harness

CASE = {"layers": 2, "sub_group_size": 300_000}
TIMEOUT = 8

pytestmark = pytest.mark.alone  # slow starts beside other tests would look like lost ranks


@pytest.mark.parametrize(
    ("how", "where", "options"),
    [
        ("dies", "sync_folder", {}),
        ("hangs", "write", {"method": "direct"}),
        pytest.param("dies", "link", {}, marks=pytest.mark.torture),
        pytest.param("hangs", "make_folder", {}, marks=pytest.mark.torture),
        pytest.param("hangs", "sync_file", {"seal": "before_commit"}, marks=pytest.mark.torture),
        pytest.param("dies", "rename", {"method": "direct", "async": True}, marks=pytest.mark.torture),
    ],
)
@pytest.mark.parametrize("lost", [1, pytest.param(0, marks=pytest.mark.torture)])
def test_a_rank_that_is_lost(
    tmp_path: Path, how: str, where: str, options: dict[str, Any], lost: int
) -> None:
    folder = tmp_path / "ck"
    start = time.monotonic()
    run = harness.run(
        tmp_path,
        "lost",
        2,
        check=False,
        until=3,
        end="abrupt",
        saves=[
            {"at": 1, "dir": str(folder), "wait": True},
            {"at": 2, "dir": str(folder), "lost_rank": [lost, how, where], "wait": True},
        ],
        nvme_checkpoint={"timeout_seconds": TIMEOUT, **options},
        **CASE,
    )
    assert time.monotonic() - start < 200  # two starts of DeepSpeed on a busy machine, and the timeouts
    (error,) = run.ranks[1 - lost]["save_errors"]
    assert error["type"] in ("PeerError", "StorageError"), error
    assert str(lost) in error["text"] and run.codes[lost] in (9, 0)
    assert not (folder / "global_step2").exists()
    assert (folder / layout.LATEST).read_text() == "global_step1"
    assert last_resumable(folder) == folder / "global_step1"
    assert audit.check(folder / "global_step1", "full").unsealed == 0
