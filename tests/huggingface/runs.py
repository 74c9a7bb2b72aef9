"""Run ``tests.huggingface.program`` in fresh processes behind ``python -m nvme_resume.run``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests import harness


def run(
    tmp: Path,
    name: str,
    ranks: int = 1,
    *,
    codes: list[int] | None = None,
    python: str = sys.executable,
    nodes: bool = False,
    options: tuple[str, ...] = (),
    program: str = "tests.huggingface.program",
    **case: Any,
) -> tuple[dict[str, Any], str]:
    """What rank 0 reports, and the logs.  ``codes``: how the ranks are expected to end; 0 unless given."""
    path = tmp / f"case-{name}.json"
    full = {"out": str(tmp / "out"), "nvme": str(tmp / f"nvme-{name}"), **case}
    path.write_text(json.dumps(full))
    report = Path(f"{full['out']}.0.json")
    report.unlink(missing_ok=True)
    found, logs = harness.launch(
        tmp, name, ranks, "nvme_resume.run", *options, "-m", program, str(path),
        python=python, nodes=nodes,
    )  # fmt: skip
    assert found == (codes or [0] * ranks), logs
    return (json.loads(report.read_text()) if report.exists() else {}), logs


def checkpoints(out: Path) -> list[str]:
    """Every name that looks like a checkpoint or what is left of one."""
    return sorted(p.name for p in out.iterdir() if "checkpoint" in p.name)
