"""Saves that freeze inodes and loads that adopt them: nobody can write into a checkpoint, and every bit is the same."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import harness

TAG = "global_step3"
STEPS = 5


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Losses of the uninterrupted run of plain DeepSpeed."""
    run = harness.run(tmp_path_factory.mktemp("whole"), "whole", mode="stock", until=STEPS)
    losses: list[str] = run.ranks[0]["losses"]
    return losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, whole: list[str]) -> Path:
    """A sealed checkpoint at step 3, by links; the run that made it trained on."""
    tmp = tmp_path_factory.mktemp("saved")
    run = harness.run(tmp, "first", until=STEPS, saves=[{"at": 3, "dir": str(tmp / "ck")}], end="exit")
    assert run.ranks[0]["losses"] == whole
    assert "by links (nothing is copied)" in run.log
    return tmp


def resume(tmp: Path, checkpoint: Path, whole: list[str], **case: Any) -> harness.Run:
    run = harness.run(tmp, "resumed", seed=9, until=STEPS, load=str(checkpoint), **case)
    assert run.ranks[0]["losses"] == whole[3:]
    return run


def test_plain_deepspeed_on_the_same_nvme_path_cannot_touch_a_checkpoint(
    tmp_path: Path, saved: Path, whole: list[str]
) -> None:
    """It writes its initial weights to all swap files and trains; then the checkpoint is resumed."""
    before = content(saved / "ck")
    swap = {p.stat().st_ino for p in (saved / "nvme-first").rglob("*.swp")}
    inside = {p.stat().st_ino for p in (saved / "ck").rglob("*.swp")}
    assert inside and not inside & swap
    harness.run(saved, "later", mode="stock", seed=4, until=2, nvme_path=str(saved / "nvme-first"))
    assert content(saved / "ck") == before
    resume(tmp_path, saved / "ck", whole, nvme_path=str(saved / "nvme-first"), end="exit")
    assert content(saved / "ck") == before


def test_the_process_s_end_lets_the_hashes_finish_and_leaves_nothing_private(saved: Path) -> None:
    assert (saved / "ck" / TAG / "nvme_resume" / "rank00.seal.json").is_file()
    assert not list((saved / "nvme-first" / "zero_stage_3" / "nvme_resume").iterdir())


def test_a_load_links_and_the_run_leaves_the_checkpoint_alone(
    tmp_path: Path, saved: Path, whole: list[str]
) -> None:
    """Two resumed runs at once from one checkpoint, each on its own nvme_path."""
    before = content(saved / "ck")
    run = resume(tmp_path, saved / "ck", whole)
    assert "no hashes" not in run.log
    assert content(saved / "ck") == before


def test_a_crash_right_after_a_save_leaves_a_checkpoint_that_loads_and_is_sealed_then(
    tmp_path: Path, whole: list[str]
) -> None:
    """Committed, not yet hashed; its owner's private files are cleaned at the next start."""
    checkpoint, nvme = tmp_path / "ck", str(tmp_path / "nvme")
    save = {"at": 3, "dir": str(checkpoint), "limit_rank": None}
    harness.run(
        tmp_path, "first", until=3, saves=[save], end="abrupt", nvme_path=nvme, skip_final_digest=True,
        nvme_checkpoint={"bandwidth_limit_mib": 1},
    )  # fmt: skip
    seal = checkpoint / TAG / "nvme_resume" / "rank00.seal.json"
    assert not seal.exists()
    left = list((tmp_path / "nvme" / "zero_stage_3" / "nvme_resume").glob("*/*.swp"))
    assert left
    before = {name: data for name, data in content(checkpoint).items() if name.endswith((".swp", ".pt"))}
    run = resume(tmp_path, checkpoint, whole, nvme_path=nvme)
    assert "it had no hashes yet" in run.log
    assert seal.is_file()
    assert not any(p.exists() for p in left)
    after = content(checkpoint)
    assert all(after[name] == data for name, data in before.items())


def test_an_unsealed_checkpoint_that_was_written_to_is_refused(tmp_path: Path) -> None:
    checkpoint = tmp_path / "ck"
    limit = {"bandwidth_limit_mib": 1}
    harness.run(
        tmp_path, "first", until=3, saves=[{"at": 3, "dir": str(checkpoint)}], end="abrupt",
        skip_final_digest=True, nvme_checkpoint=limit,
    )  # fmt: skip
    path = next((checkpoint / TAG).rglob("exp_avg-*.swp"))
    with path.open("r+b") as file:
        file.write(b"x")
    run = harness.run(tmp_path, "resumed", until=4, failing_loads=[{"dir": str(checkpoint)}])
    (failure,) = run.ranks[0]["failures"]
    assert failure["type"] == "CorruptError" and "written to after the commit" in failure["text"]
    assert failure["untouched"]


def test_removing_the_newest_checkpoint_does_not_harm_the_running_training(
    tmp_path: Path, whole: list[str]
) -> None:
    """Before the next step, so that the frozen inodes' only other name is gone; and twice saved without a step."""
    saves = [
        {"at": 2, "dir": str(tmp_path / "a"), "remove": True},
        {"at": 3, "dir": str(tmp_path / "b"), "wait": True},
        {"at": 3, "dir": str(tmp_path / "c"), "remove": True},
    ]
    run = harness.run(tmp_path, "first", until=STEPS, saves=saves)
    assert run.ranks[0]["losses"] == whole
    resume(tmp_path, tmp_path / "b", whole)


def flip(checkpoint: Path, pattern: str) -> str:
    path = sorted((checkpoint / TAG / "offloaded_tensors").glob(pattern))[-1]
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1
    path.write_bytes(data)
    return path.name


def test_a_damaged_master_is_found_while_it_is_read_and_the_engine_goes_back(
    tmp_path: Path, saved: Path, whole: list[str]
) -> None:
    """The last one, so that others were restored by then; into an engine that has trained."""
    bad = tmp_path / "bad"
    shutil.copytree(saved / "ck", bad)
    name = flip(bad, "rank00/[0-9]*.swp")
    run = harness.run(
        tmp_path, "resumed", seed=9, until=STEPS, load=str(saved / "ck"), failing_loads=[{"dir": str(bad)}] * 2,
        train_before_load=True,
    )  # fmt: skip
    for failure in run.ranks[0]["failures"]:
        assert failure["type"] == "CorruptError" and name in failure["text"], failure
        assert failure["untouched"]
    assert run.ranks[0]["losses"] == whole[3:]


def test_a_damaged_moment_of_one_rank_stops_all_ranks_before_the_first_step(tmp_path: Path) -> None:
    """And a save before that step, or the new checkpoint would hold it under a good hash."""
    case = {"layers": 3, "sub_group_size": 300_000}
    checkpoint = tmp_path / "ck"
    harness.run(tmp_path, "first", 2, until=3, saves=[{"at": 3, "dir": str(checkpoint)}], **case)
    name = flip(checkpoint, "rank01/exp_avg_sq-*.swp")
    run = harness.run(
        tmp_path, "resumed", 2, check=False, seed=9, until=STEPS, load=str(checkpoint), skip_loaded_digest=True,
        saves=[{"at": 3, "dir": str(tmp_path / "laundered"), "limit_rank": None, "skip_digest": True}], **case,
    )  # fmt: skip
    assert [r["save_errors"][0]["type"] for r in run.ranks] == ["CorruptError"] * 2
    assert not (tmp_path / "laundered").exists()
    assert [e["type"] for e in run.errors] == ["CorruptError"] * 2, run.log
    assert all(name in e["text"] and "rank 1" in e["text"] for e in run.errors)
    assert [r["losses"] for r in run.ranks] == [[], []]


def test_writes_through_deepspeeds_functions_do_not_reach_the_checkpoint(
    tmp_path: Path, whole: list[str]
) -> None:
    """``safe_set_full_*`` right after a save: the run goes on as it would without us, the checkpoint stays.

    Not pipelined: there plain DeepSpeed 0.19.8 itself stops in the next step.
    """
    poked = harness.run(
        tmp_path, "stock", mode="stock", until=STEPS, saves=[{"at": 3, "dir": None, "poke": True}]
    )
    save = {"at": 3, "dir": str(tmp_path / "ck"), "poke": True}
    ours = harness.run(tmp_path, "ours", until=STEPS, saves=[save])
    assert ours.ranks[0]["losses"] == poked.ranks[0]["losses"] != whole
    resume(tmp_path, tmp_path / "ck", whole)


@pytest.mark.parametrize(
    "case",
    [
        {"pipelined": True, "offload_param": "nvme", "zero_init": True},
        {"lora": True, "offload_param": "nvme", "persistence": 0},
    ],
)
def test_no_aio_handle_is_left_without_a_proxy(tmp_path: Path, case: dict[str, Any]) -> None:
    run = harness.run(tmp_path, "run", until=1, list_bare_handles=True, **case)
    assert run.ranks[0]["bare_handles"] == []


METHODS: dict[str, dict[str, Any]] = {
    "server": {"method": "server"},
    "direct": {"method": "direct"},
    "link, hashed before the commit": {"seal": "before_commit"},
    "background": {"method": "direct", "async": True},
}


@pytest.mark.parametrize("name", METHODS)
def test_every_way_to_save_resumes_to_the_last_bit(tmp_path: Path, whole: list[str], name: str) -> None:
    """The run that saved trains on meanwhile, and ends by itself with a complete checkpoint."""
    checkpoint = tmp_path / "ck"
    saves = [{"at": at, "dir": str(checkpoint)} for at in (2, 3)]
    first = harness.run(
        tmp_path, "first", until=STEPS, saves=saves, nvme_checkpoint=METHODS[name], end="exit"
    )
    assert first.ranks[0]["losses"] == whole
    assert (checkpoint / "latest").read_text() == TAG
    assert (checkpoint / TAG / "nvme_resume" / "rank00.seal.json").is_file()
    assert sorted(p.name for p in checkpoint.iterdir() if p.is_dir()) == ["global_step2", TAG]
    resume(tmp_path, checkpoint, whole, nvme_checkpoint=METHODS[name])


def test_a_background_copy_that_fails_is_reported_by_the_next_call_on_every_rank(tmp_path: Path) -> None:
    """Rank 1's disk is full in the middle of the copy: nothing is published, training and later saves go on."""
    checkpoint = tmp_path / "ck"
    case = {"layers": 3, "sub_group_size": 300_000, "nvme_checkpoint": {"method": "direct", "async": True}}
    saves = [
        {"at": 1, "dir": str(checkpoint)},
        {"at": 2, "dir": str(checkpoint), "fault": [1, "pwrite", 1, errno.ENOSPC], "wait": True},
        {"at": 3, "dir": str(checkpoint), "wait": True, "fault": [0, "pwrite", 1, errno.EIO]},
    ]
    run = harness.run(tmp_path, "run", 2, until=4, saves=saves, **case)
    for rank in run.ranks:
        assert [e["type"] for e in rank["save_errors"]] == ["NoSpaceError", "StorageError"], run.log
    assert (checkpoint / "latest").read_text() == "global_step1"
    assert [p.name for p in checkpoint.iterdir() if p.is_dir()] == ["global_step1"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_no_room_for_the_next_step_is_known_when_saving(tmp_path: Path, whole: list[str]) -> None:
    """A small disk: room for the swap files, not for fresh ones beside frozen ones.  Training goes on."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=104m", "none", str(place)]
    if subprocess.run(command, check=False).returncode:
        pytest.skip("cannot mount here")
    try:
        save = {"at": 3, "dir": str(place / "ck"), "limit_rank": None}
        run = harness.run(tmp_path, "run", until=STEPS, nvme_path=str(place / "nvme"), saves=[save])
        (error,) = run.ranks[0]["save_errors"]
        assert (
            error["type"] == "NoSpaceError"
            and "no room for the checkpoint and the next step" in error["text"]
        )
        assert run.ranks[0]["losses"] == whole
        assert not [p for p in (place / "ck").iterdir() if p.is_dir()]
    finally:
        subprocess.run(["umount", str(place)], check=True)
