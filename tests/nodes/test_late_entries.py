"""One folder, two mounts that remember for seconds what was not there, or was: what NFS clients do."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvme_resume.storage import audit
from tests import harness
from tests.nodes import cases

_SECONDS = 2  # that a mount may be behind


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """The save folder of both nodes, each of which sees it through a mount of its own."""
    if shutil.which("bindfs") is None:
        pytest.skip("bindfs is not installed")
    real = tmp_path / "server"
    real.mkdir()
    mounts = [cases.folder(tmp_path, node) for node in (0, 1)]
    mounted = []
    stale = f"entry_timeout={_SECONDS},negative_timeout={_SECONDS},attr_timeout={_SECONDS}"
    try:
        for mount in mounts:
            mount.mkdir(parents=True)
            done = subprocess.run(
                ["bindfs", "-o", stale, str(real), str(mount)], capture_output=True, text=True, check=False
            )
            if done.returncode:
                pytest.skip(f"cannot mount: {done.stderr.strip()}")
            mounted.append(mount)
        yield real
    finally:
        for mount in mounted:
            subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.parametrize("in_background", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_saves_rotation_and_resume(tmp_path: Path, shared: Path, in_background: bool) -> None:
    """Also of a tag that is saved again, whose folder the other node still knows as the one before; and at once."""
    saves = [
        {"at": 1, "dir": "ck", "skip_digest": True},
        {"at": 2, "dir": "ck", "tag": "again", "skip_digest": True},
        {"at": 3, "dir": "ck", "tag": "again", "skip_digest": True},
    ]
    options = {"keep_last": 1, "timeout_seconds": 60, "gather": "main", "async": in_background}
    harness.run(
        tmp_path, "at-once", 2, **{**cases.CASE, **cases.nodes(tmp_path), "until": 3}, saves=saves, reload="ck",
        nvme_checkpoint=options,
    )  # fmt: skip
    whole = cases.saved(tmp_path, 2, options, saves=saves, until=5)
    audit.check(shared / "again", "full")
    assert [p.name for p in shared.iterdir() if p.is_dir()] == ["again"]
    assert (shared / "latest").read_text() == "again"
    assert "the ranks see 2 save folders" not in (tmp_path / "log-whole.0.txt").read_text()
    case = {**cases.CASE, **cases.nodes(tmp_path), "until": 5}
    found = harness.run(tmp_path, "resumed", 2, **case, seed=2, load="ck", nvme_checkpoint=options)
    assert [r["losses"] for r in found.ranks] == [r["losses"][3:] for r in whole.ranks]
    assert " gets the files of ranks" not in (tmp_path / "log-resumed.0.txt").read_text()
