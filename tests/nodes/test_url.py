"""Training runs whose checkpoints go to a URL and come back from there, in real processes."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from nvme_resume import layout
from nvme_resume.storage import audit
from tests import harness, object_store
from tests.nodes import cases


def test_the_end_of_the_process_waits_and_a_damaged_one_is_skipped(
    tmp_path: Path, bucket: object_store.Bucket
) -> None:
    """A copy in the background, then the upload, then the end of the program, which nothing else waits for."""
    saves = [{"at": at, "dir": str(tmp_path / "ck"), "skip_digest": True} for at in (1, 2)]
    options = {"upload": bucket.url, "async": True, "method": "direct"}
    case = {"layers": 1, "until": 3, "skip_final_digest": True}
    harness.run(tmp_path, "whole", 2, **case, saves=saves, nvme_checkpoint=options, end="exit")
    log = (tmp_path / "log-whole.0.txt").read_text()
    assert f"{cases.TAG}/{layout.manifest()}" in bucket.objects(), log
    assert "; complete" in log and "Traceback" not in log
    # The newest turns out damaged: the load takes the one before, of all saved ranks.
    bucket.flip(next(n for n in bucket.objects() if n.startswith(cases.TAG) and n.endswith(".swp")), 1000)
    resumed = harness.run(tmp_path, "resumed", 1, **case, seed=2, load=bucket.url)
    assert resumed.ranks[0]["start"] == 1 and len(resumed.ranks[0]["losses"]) == 2


def test_a_server_that_is_away_stops_no_training(
    tmp_path: Path, bucket: object_store.Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said at once, ``wait_for_checkpoint`` raises on every rank, and a later run brings what is missing."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    mishap = {"limit_rank": 9}  # errors are noted
    saves = [{"at": 1, "dir": str(tmp_path / "ck"), "wait": True, "skip_digest": True, **mishap}]
    case = {"layers": 1, "until": 2, "skip_final_digest": True, "nvme_checkpoint": {"upload": bucket.url}}
    run = harness.run(tmp_path, "whole", 2, **case, saves=saves, end="abrupt")
    for rank in run.ranks:
        assert len(rank["losses"]) == 2
        (error,) = rank["save_errors"]
        assert error["type"] == "StorageError" and bucket.url in error["text"] and "rank 0" in error["text"]
    assert "training goes on" in (tmp_path / "log-whole.0.txt").read_text()
    assert not bucket.objects()


@pytest.mark.parametrize("in_background", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_waiting_uploads_what_was_put_off(tmp_path: Path, in_background: bool) -> None:
    """Uploads cannot keep up with the saves, which is said; the last one goes when it is waited for."""
    url = (tmp_path / "bucket").as_uri()
    options = {"upload": url, "async": in_background, "method": "direct", "network_limit_mib": 4.0}
    saves: list[dict[str, Any]]
    saves = [{"at": at, "dir": str(tmp_path / "ck"), "skip_digest": True} for at in range(1, 7)]
    if in_background:  # one that is never committed does not take its place
        saves += [{**saves[0], "at": 7, "wait": True, "fault": [0, "pwrite", 1, errno.ENOSPC]}]
    case = {"layers": 1, "until": 7, "skip_final_digest": True}
    harness.run(tmp_path, "whole", 1, **case, saves=saves, nvme_checkpoint=options)
    assert "is not uploaded" in (tmp_path / "log-whole.0.txt").read_text()
    assert (tmp_path / "bucket" / "latest").read_text() == "global_step6"
    audit.check(tmp_path / "bucket" / "global_step6", "full")


def test_a_missing_package_stops_the_start(tmp_path: Path) -> None:
    run = harness.run(tmp_path, "s", 2, check=False, layers=1, nvme_checkpoint={"upload": "nowhere://b/run"})
    assert [e["type"] for e in run.errors] == ["ConfigError"] * 2, json.dumps(run.errors)
