"""All ranks fail together, none hangs, and training may go on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch.distributed as dist

from nvme_resume.errors import PeerError
from nvme_resume.peers import Peers
from tests import harness

CASE = {"layers": 3, "sub_group_size": 300_000}


def test_a_rank_that_cannot_write_fails_the_save_on_all_and_training_goes_on(tmp_path: Path) -> None:
    """Rank 1 meets a real file size limit; the older checkpoint and ``latest`` stay, losses too."""
    checkpoint = str(tmp_path / "ck")
    whole = harness.run(tmp_path, "whole", 2, mode="stock", until=5, **CASE)
    run = harness.run(
        tmp_path,
        "limited",
        2,
        until=5,
        nvme_checkpoint={"method": "direct"},
        saves=[{"at": 2, "dir": checkpoint}, {"at": 4, "dir": checkpoint, "limit_rank": 1}],
        **CASE,
    )
    for rank in range(2):
        assert run.ranks[rank]["save_errors"][0]["type"] == "NoSpaceError"
        assert "rank 1" in run.ranks[rank]["save_errors"][0]["text"]
        assert run.ranks[rank]["losses"] == whole.ranks[rank]["losses"]
    assert (tmp_path / "ck" / "latest").read_text() == "global_step2"
    assert sorted(p.name for p in (tmp_path / "ck").iterdir() if p.is_dir()) == ["global_step2"]
    resumed = harness.run(tmp_path, "resumed", 2, seed=9, until=5, load=checkpoint, **CASE)
    assert resumed.ranks[1]["losses"] == whole.ranks[1]["losses"][2:]


@pytest.mark.alone
def test_a_rank_that_never_arrives_is_named(tmp_path: Path) -> None:
    started = time.monotonic()
    run = harness.run(
        tmp_path,
        "absent",
        2,
        check=False,
        until=2,
        saves=[{"at": 2, "dir": str(tmp_path / "ck"), "absent_rank": 1}],
        nvme_checkpoint={"timeout_seconds": 8},
        **CASE,
    )
    assert time.monotonic() - started < 120
    error = run.ranks[0]["save_errors"][0]
    assert error["type"] == "PeerError"
    assert "1" in error["text"] and "not all ranks arrived" in error["text"]


def test_ranks_that_disagree_on_the_tag(tmp_path: Path) -> None:
    run = harness.run(
        tmp_path,
        "disagree",
        2,
        until=1,
        saves=[{"at": 1, "dir": str(tmp_path / "ck"), "tag_per_rank": True}],
        **CASE,
    )
    for rank in range(2):
        assert run.ranks[rank]["save_errors"][0]["type"] == "PeerError"
        assert "disagree" in run.ranks[rank]["save_errors"][0]["text"]


def test_a_process_group_that_was_destroyed_is_named() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        peers = Peers(5.0)
        peers.alone = False  # as with more ranks
        peers._group = dist.new_group(backend="gloo")
        assert peers.run(lambda: 7, "a test") == [7]
    finally:
        dist.destroy_process_group()
    with pytest.raises(PeerError, match=r"a test needs the other ranks.*destroy_process_group"):
        peers.run(lambda: 7, "a test")
