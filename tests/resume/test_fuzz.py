"""Random sequences of saves, loads, removals and writes: the way a checkpoint is made must not show in the training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import harness

KINDS: list[dict[str, Any]] = [
    {"accumulation": 2},
    {"pipelined": True},
    {"lora": True, "offload_param": "nvme", "persistence": 0},
    {"offload_param": "nvme", "pipelined": True, "persistence": 0, "accumulation": 2},
]
METHODS: dict[str, Any] = {
    "link": True,
    "hashed": {"seal": "before_commit", "verify": "full"},
    "direct": {"method": "direct"},
    "async": {"method": "direct", "async": True},
}


def fuzz(tmp: Path, method: str, seed: int, steps: int) -> dict[str, Any]:
    tmp = tmp / method
    tmp.mkdir()
    out = tmp / "out.json"
    case = {
        **harness.DEFAULTS,
        **KINDS[seed % len(KINDS)],
        "nvme_path": str(tmp / "nvme"),
        "checkpoints": str(tmp / "ck"),
        "nvme_checkpoint": METHODS[method],
        "fuzz_seed": seed,
        "steps": steps,
        "out": str(out),
    }
    (tmp / "case.json").write_text(json.dumps(case))
    codes, logs = harness.launch(tmp, method, 1, "tests.fuzz", str(tmp / "case.json"))
    assert codes == [0], logs
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(8))
def test_all_methods_agree_and_no_committed_byte_changes(tmp_path: Path, seed: int) -> None:
    found = {method: fuzz(tmp_path, method, seed, 45) for method in METHODS}
    for method, result in found.items():
        assert result["changed"] == [], method
        assert result["log"] == found["link"]["log"], method
        assert harness.differences(found["link"]["final"], result["final"]) == [], method


def test_a_short_sequence(tmp_path: Path) -> None:
    """The same with few steps, in the default way, for every change."""
    result = fuzz(tmp_path, "link", 0, 20)
    assert result["changed"] == []
    assert result["private"] <= 9 and result["descriptors"] < 100
