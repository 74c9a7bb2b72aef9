"""Resumed runs equal uninterrupted ones to the last bit: losses, weights, every state tensor, steps, random states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import harness

TWO_RANKS = {"layers": 3, "sub_group_size": 300_000}

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "adamw-bf16-clipping-accumulation": (1, {"accumulation": 2, "clipping": 1.0}),
    "adam-fp32-pipelined-two-ranks": (
        2,
        {"dtype": "fp32", "pipelined": True, "optimizer": "Adam", **TWO_RANKS},
    ),
    "lion-lora-frozen-and-params-on-nvme": (
        1,
        {"optimizer": "Lion", "lora": True, "offload_param": "nvme", "zero_init": True, "persistence": 0},
    ),
    "muon-two-ranks": (2, {"optimizer": "Muon", **TWO_RANKS}),
    "cpu-offload-keeps-hidden-beta-products": (1, {"offload_optimizer": "cpu", "dtype": "fp32"}),
}


@pytest.mark.parametrize("name", CASES)
def test_resume_equals_the_uninterrupted_run(tmp_path: Path, name: str) -> None:
    ranks, case = CASES[name]
    scale = case.get("accumulation", 1)
    harness.assert_equal_resume(tmp_path, ranks, save_at=5 * scale, steps=10 * scale, **case)


@pytest.mark.parametrize("save_at", [0, 1])
def test_save_before_and_after_the_first_step(tmp_path: Path, save_at: int) -> None:
    harness.assert_equal_resume(tmp_path, 1, save_at=save_at, steps=save_at + 5, dtype="fp32")


def test_save_inside_an_accumulation_window_keeps_its_gradients(tmp_path: Path) -> None:
    """Five micro batches of windows of two: the third window is open (stock drops its gradient)."""
    harness.assert_equal_resume(tmp_path, 2, save_at=5, steps=12, accumulation=2, dtype="fp32", **TWO_RANKS)


def test_checkpoint_of_plain_deepspeed_resumes_exactly(tmp_path: Path) -> None:
    """Master weights, moments, steps, tiny sub-groups; its random states were never saved, so no dropout."""
    harness.assert_equal_resume(tmp_path, 2, first="stock", dtype="fp32", dropout=0.0, **TWO_RANKS)


def test_running_past_a_checkpoint_saving_a_tag_again_and_resuming_twice(tmp_path: Path) -> None:
    """Stock raises FileExistsError at the second save of a tag (cases C2, C3)."""
    checkpoint = str(tmp_path / "ck")
    save = {"dir": checkpoint, "tag": "same"}
    whole = harness.run(tmp_path, "whole", mode="stock", until=9)
    harness.run(
        tmp_path, "first", until=6, saves=[{"at": 3, **save}, {"at": 4, **save}, {"at": 6, "dir": checkpoint}]
    )
    second = harness.run(
        tmp_path,
        "second",
        seed=5,
        until=6,
        load={"dir": checkpoint, "tag": "same"},
        saves=[{"at": 6, "dir": checkpoint}],
    )
    third = harness.run(tmp_path, "third", seed=6, until=9, load=checkpoint)
    assert second.ranks[0]["start"] == 4
    assert second.ranks[0]["losses"] == whole.ranks[0]["losses"][4:6]
    assert third.ranks[0]["losses"] == whole.ranks[0]["losses"][6:]
    assert sorted(p.name for p in (tmp_path / "ck").iterdir() if p.is_dir()) == ["global_step6", "same"]


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"pipelined": True, "offload_param": "nvme"},
        pytest.param({"offload_optimizer": "cpu"}, marks=pytest.mark.matrix),
        # Frozen parameters that are persistent are in memory while a load is prepared, on NVMe while it is applied.
        {"lora": True, "offload_param": "nvme", "persistence": 10_000_000, "train_before_load": True},
    ],
)
def test_going_back_to_a_checkpoint_in_the_same_process(tmp_path: Path, case: dict[str, Any]) -> None:
    """An engine that has trained on goes back and repeats itself; a save right after a load is the same checkpoint."""
    checkpoint, copy = str(tmp_path / "ck"), str(tmp_path / "copy")
    settings = {"dtype": "fp32", **case}
    save = {"at": 3, "dir": checkpoint}
    run = harness.run(
        tmp_path, "run", until=6, saves=[save], reload=checkpoint, **{**settings, "train_before_load": False}
    )
    assert run.ranks[0]["reloaded_losses"] == run.ranks[0]["losses"][3:]
    harness.run(
        tmp_path, "copy", seed=8, until=3, load=checkpoint, saves=[{"at": 3, "dir": copy}], **settings
    )
    resumed = harness.run(tmp_path, "resumed", seed=9, until=6, load=copy, **settings)
    assert resumed.ranks[0]["losses"] == run.ranks[0]["losses"][3:]


def test_nothing_to_load_is_what_deepspeed_says_it_is(tmp_path: Path) -> None:
    """No ``latest``: (None, None) and training from scratch, as callers of DeepSpeed expect."""
    (tmp_path / "empty").mkdir()
    run = harness.run(tmp_path, "run", until=1, load=str(tmp_path / "empty"))
    assert run.ranks[0]["load_path"] is None
    assert run.ranks[0]["start"] == 0


def test_killed_in_the_middle_of_a_save(tmp_path: Path) -> None:
    """kill -9 at a storage call of the copier: the older checkpoint loads, the left-over goes with the next save."""
    checkpoint = tmp_path / "ck"
    whole = harness.run(tmp_path, "whole", mode="stock", until=6)
    harness.run(
        tmp_path,
        "killed",
        check=False,
        until=4,
        nvme_checkpoint={"method": "direct"},
        saves=[{"at": 2, "dir": str(checkpoint)}, {"at": 4, "dir": str(checkpoint), "kill_at": 25}],
    )
    assert any(p.name.startswith(".tmp-") for p in checkpoint.iterdir())
    resumed = harness.run(
        tmp_path, "resumed", seed=9, until=6, load=str(checkpoint), saves=[{"at": 4, "dir": str(checkpoint)}]
    )
    assert resumed.ranks[0]["start"] == 2
    assert resumed.ranks[0]["losses"] == whole.ranks[0]["losses"][2:]
    assert sorted(p.name for p in checkpoint.iterdir() if p.is_dir()) == ["global_step2", "global_step4"]


@pytest.mark.parametrize("offload", ["nvme", "cpu"])
def test_a_save_between_backward_and_step_is_refused(tmp_path: Path, offload: str) -> None:
    """Both inside an accumulation window and at its end; nothing is published (case E9)."""
    folder = tmp_path / "ck"
    run = harness.run(
        tmp_path, "run", until=4, accumulation=2, offload_optimizer=offload, save_after_backward=str(folder)
    )
    assert [kind for kind, _ in run.ranks[0]["refused"]] == ["UnsupportedError"] * 4
    assert not (folder / "latest").exists()
