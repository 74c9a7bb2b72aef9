"""What may change between save and resume is restored exactly; what may not is one clear error, nothing touched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import harness

SAVED_AT = 4


def restored_weights(run: harness.Run) -> dict[str, Any]:
    return run.ranks[0]["loaded"]["param16"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One fp32 checkpoint of one rank, and the uninterrupted run's report beside it."""
    tmp = tmp_path_factory.mktemp("saved")
    run = harness.run(tmp, "first", dtype="fp32", until=8, saves=[{"at": SAVED_AT, "dir": str(tmp / "ck")}])
    (tmp / "report.json").write_text(json.dumps(run.ranks[0]))
    return tmp


def report(saved: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((saved / "report.json").read_text())
    return found


CHANGES: dict[str, dict[str, Any]] = {
    "sub_group_size": {"sub_group_size": 2_000_000},
    "aio block_size (nothing is swapped any more)": {"block_size": 32 << 20},
    "intra_op_parallelism": {"intra_op_parallelism": 3},
    "pipelined": {"pipelined": True},
    "into a CPU offload engine": {"offload_optimizer": "cpu"},
    "parameters on NVMe": {"offload_param": "nvme"},
    "zero.Init (other parameter ids)": {"zero_init": True},
}


@pytest.mark.parametrize("change", CHANGES)
def test_these_may_change_and_the_run_continues_exactly(tmp_path: Path, saved: Path, change: str) -> None:
    """One rank: cutting differently changes no arithmetic, so even the losses stay equal."""
    run = harness.run(
        tmp_path, "resumed", seed=9, until=8, load=str(saved / "ck"), **{"dtype": "fp32", **CHANGES[change]}
    )
    expected = report(saved)
    assert run.ranks[0]["losses"] == expected["losses"][SAVED_AT:]
    assert harness.differences(expected["saved"][0]["param16"], restored_weights(run)) == []


def test_from_cpu_offload_into_nvme(tmp_path: Path) -> None:
    first = harness.run(
        tmp_path,
        "first",
        dtype="fp32",
        offload_optimizer="cpu",
        until=8,
        saves=[{"at": 4, "dir": str(tmp_path / "ck")}],
    )
    run = harness.run(
        tmp_path,
        "resumed",
        seed=9,
        dtype="fp32",
        until=8,
        load=str(tmp_path / "ck"),
        sub_group_size=2_000_000,
    )
    assert run.ranks[0]["losses"] == first.ranks[0]["losses"][4:]


def test_random_states_and_scheduler_can_be_left_alone(tmp_path: Path, saved: Path) -> None:
    """``"rng": false`` and ``load_lr_scheduler_states=False``; all else is restored."""
    load = {"dir": str(saved / "ck"), "load_lr_scheduler_states": False}
    without = {"nvme_checkpoint": {"rng": False}, "load": load}
    run = harness.run(tmp_path, "resumed", seed=9, dtype="fp32", until=SAVED_AT, **without)
    expected, found = report(saved)["saved"][0], run.ranks[0]["loaded"]
    differ = harness.differences(expected, found)
    assert [d.split(":")[0] for d in differ] == ["/lr/scheduler", "/rng/numpy", "/rng/python", "/rng/torch"]
    assert '"last_batch_iteration": -1' in found["lr"]["scheduler"]


def test_another_dtype_keeps_the_masters(tmp_path: Path, saved: Path) -> None:
    """The 16-bit weights are cast anew from the saved fp32 masters; state is the saved state."""
    run = harness.run(tmp_path, "resumed", seed=9, dtype="bf16", until=SAVED_AT, load=str(saved / "ck"))
    expected = report(saved)["saved"][0]
    for kind in ("master", "exp_avg", "exp_avg_sq", "step", "hyper"):
        assert harness.differences(expected[kind], run.ranks[0]["loaded"][kind]) == [], kind


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3)])
def test_another_world_size_restores_every_value(tmp_path: Path, before: int, after: int) -> None:
    """Save with some ranks, load with others, save there, load with the first number: bits come back."""
    case: dict[str, Any] = {
        "dtype": "fp32",
        "sub_group_size": 300_000,
        "lora": True,
        "skip_final_digest": True,
    }
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    first = harness.run(tmp_path, "first", before, until=3, saves=[{"at": 3, "dir": one}], **case)
    harness.run(tmp_path, "other", after, seed=8, until=3, load=one, saves=[{"at": 3, "dir": two}], **case)
    back = harness.run(tmp_path, "back", before, seed=9, until=3, load=two, **case)
    for rank in range(before):
        for kind in ("master", "param16", "exp_avg", "exp_avg_sq", "step", "hyper", "lr"):
            saved, found = first.ranks[rank]["saved"][0][kind], back.ranks[rank]["loaded"][kind]
            assert harness.differences(saved, found) == [], f"rank {rank} {kind}"


def test_weights_alone(tmp_path: Path, saved: Path) -> None:
    """load_module_only and load_optimizer_states=False do what they say (stock crashes, case E7)."""
    load = {"dir": str(saved / "ck"), "tag": f"global_step{SAVED_AT}"}
    only = harness.run(
        tmp_path, "only", seed=9, dtype="fp32", load={**load, "load_module_only": True}, until=0
    )
    fresh = harness.run(
        tmp_path, "fresh", seed=9, dtype="fp32", load={**load, "load_optimizer_states": False}, until=SAVED_AT
    )
    expected = report(saved)["saved"][0]
    for run in (only, fresh):
        assert harness.differences(expected["master"], run.ranks[0]["loaded"]["master"]) == []
        assert harness.differences(expected["param16"], restored_weights(run)) == []
        assert "exp_avg" not in run.ranks[0]["loaded"]
    assert only.ranks[0]["global_steps"] == 0
    assert fresh.ranks[0]["global_steps"] == SAVED_AT


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(p.relative_to(folder)): (p.stat().st_size, p.stat().st_mtime_ns)
        for p in folder.rglob("*")
        if p.is_file()
    }


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "another optimizer": ({"optimizer": "Lion"}, "IncompatibleError", "optimizer changed"),
    "another model": ({"layers": 4}, "IncompatibleError", "does not match the checkpoint"),
    "other frozen parameters": ({"lora": True}, "IncompatibleError", "does not match the checkpoint"),
    "other parameter groups": ({"two_groups": False}, "IncompatibleError", "another parameter group"),
}


@pytest.mark.parametrize("change", REFUSED)
def test_these_are_refused_by_name(tmp_path: Path, saved: Path, change: str) -> None:
    case, kind, text = REFUSED[change]
    before = files_of(saved / "ck")
    run = harness.run(
        tmp_path, "resumed", check=False, seed=9, until=8, load=str(saved / "ck"), **{"dtype": "fp32", **case}
    )
    assert [e["type"] for e in run.errors] == [kind], run.log
    assert text in run.errors[0]["text"]
    assert files_of(saved / "ck") == before
    assert not list(tmp_path.glob("nvme-*/zero_stage_3/nvme_resume/*/*.swp"))


def test_too_few_buffers_are_refused_before_training(tmp_path: Path) -> None:
    """Stock asserts in the middle of the first step (case E3)."""
    from tests import training

    case = {**harness.DEFAULTS, "pipelined": True, "nvme_path": "x"}
    config = training.ds_config(case)
    assert config["zero_optimization"]["offload_optimizer"]["buffer_count"] == 12
    run = harness.run(
        tmp_path, "few", check=False, pipelined=True, nvme_checkpoint={"enabled": True}, buffers=5, until=2
    )
    assert [e["type"] for e in run.errors] == ["ConfigError"], run.log
    assert "buffer_count" in run.errors[0]["text"]
