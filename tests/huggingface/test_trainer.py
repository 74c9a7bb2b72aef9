"""Case S1 and its relatives: ``resume_from_checkpoint=True`` is exact, with no code of ours in the script."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.huggingface import runs

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    # Without ``gather`` the Trainer saves the same DeepSpeed tag twice in one save (case C2).
    "warmup": (1, {"gather": False}),
    # 40 rows for two ranks are 10 micro-batches each: groups of 3, 3, 3 and 1.
    "cosine, partial groups": (
        2,
        {
            "scheduler": "cosine",
            "rows": 40,
            "arguments": {"gradient_accumulation_steps": 3, "warmup_steps": 1},
        },
    ),
    "lora": (1, {"lora": True}),
    "sft": (2, {"kind": "sft", "arguments": {"save_steps": 2}}),
    "grpo": (2, {"kind": "grpo", "arguments": {"save_steps": 2}}),
    "sft, one rank": (1, {"kind": "sft", "arguments": {"save_steps": 2}}),
    "grpo, one rank": (1, {"kind": "grpo", "arguments": {"save_steps": 2}}),
    "one rank, partial groups": (
        1,
        {"scheduler": "cosine", "rows": 20, "arguments": {"gradient_accumulation_steps": 3}},
    ),
}
FAST = ("warmup", "cosine, partial groups", "lora", "sft", "grpo")


def test_monitors_hear_of_saves(tmp_path: Path) -> None:
    monitor = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "job"}}
    runs.run(tmp_path, "monitored", config=monitor, steps=4, arguments={"save_steps": 2})
    for name in ("blocked_seconds", "bytes", "commit_seconds"):
        (path,) = (tmp_path / "csv").rglob(f"Checkpoint_{name}.csv")
        rows = [line.split(",") for line in path.read_text().splitlines()]
        assert len(rows) == 3 and all(float(value) > 0 for _, value in rows[1:]), rows  # and a heading


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.huggingface) for n in CASES]
)
def test_resumes_exactly(tmp_path: Path, name: str) -> None:
    ranks, case = CASES[name]
    case = {
        **case,
        "ends_as_usual": True,
    }  # a hash that is being written when the process is cut off would stay behind
    whole, _ = runs.run(tmp_path, "whole", ranks, **case)
    out = tmp_path / "out"
    shutil.rmtree(out / "checkpoint-6")
    step = max(int(n.rpartition("-")[2]) for n in runs.checkpoints(out))
    resumed, _ = runs.run(tmp_path, "resumed", ranks, **case, resume=True)
    assert [e["step"] for e in whole["logs"]] == [1, 2, 3, 4, 5, 6]
    assert [e for e in resumed["logs"] if e["step"] > step] == whole["logs"][step:]
    assert resumed["logs"] == whole["logs"]
    tag = out / "checkpoint-6" / "global_step6"
    assert json.loads((tag / "nvme_resume" / "manifest.json").read_text())["body"]["world_size"] == ranks
    assert not [p for p in out.rglob(".*") if p.name.startswith((".tmp-", ".old-"))]
