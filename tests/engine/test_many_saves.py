"""200 saves with rotation leave no more behind than the first ones did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import harness


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (60, {}),
        pytest.param(200, {}, marks=pytest.mark.torture),
        pytest.param(200, {"method": "direct"}, marks=pytest.mark.torture),
        pytest.param(200, {"method": "direct", "async": True}, marks=pytest.mark.torture),
    ],
    ids=["60", "link", "direct", "async"],
)
def test_flat(tmp_path: Path, count: int, options: dict[str, Any]) -> None:
    case = harness.DEFAULTS | {
        "layers": 2,
        "sub_group_size": 300_000,
        "nvme_path": str(tmp_path / "nvme"),
        "save_dir": str(tmp_path / "ck"),
        "out": str(tmp_path / "out.json"),
        "count": count,
        "nvme_checkpoint": {"keep_last": 2, **options},
    }
    (tmp_path / "case.json").write_text(json.dumps(case))
    codes, log = harness.launch(tmp_path, "many", 1, "tests.engine.many", str(tmp_path / "case.json"))
    assert codes == [0], log
    report = json.loads((tmp_path / "out.json").read_text())
    early, late = report["holds"][1], report["holds"][-1]
    for what in ("descriptors", "threads", "tasks", "names"):
        assert late[what] <= early[what], (what, report)
    assert late["disk"] <= early["disk"] * 1.05, report
    assert late["rss"] - early["rss"] < 8 << 20, report  # one of its checkpoints has 14 MB
    tags = [name for name in report["left"] if name.startswith("global_step")]
    assert tags == sorted(f"global_step{step}" for step in (count - 1, count))
    assert not [name for name in report["left"] if name.startswith((".tmp-", ".old-"))]
