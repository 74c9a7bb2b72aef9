"""Case S1: Hugging Face ``Trainer``, ``resume_from_checkpoint=True``, a DeepSpeed configuration full of "auto"."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import harness


def run(
    tmp: Path, out: Path, name: str, ranks: int, seed: int, steps: int, *extra: str
) -> list[dict[str, Any]]:
    port = str(harness.free_port())
    processes, logs = [], []
    for rank in range(ranks):
        log = tmp / f"log-{name}.{rank}.txt"
        logs.append(log)
        with log.open("wb") as stream:
            processes.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "tests.trainer_program",
                        str(out),
                        str(tmp / f"nvme-{name}"),
                        str(seed),
                        str(steps),
                        *extra,
                    ],
                    cwd=harness.ROOT,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    env={
                        **os.environ,
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank),
                        "WORLD_SIZE": str(ranks),
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": port,
                        "DS_ACCELERATOR": "cpu",
                        "OMP_NUM_THREADS": "1",
                        "PYTHONPATH": str(harness.ROOT),
                    },
                )
            )
    codes = [process.wait(timeout=400) for process in processes]
    assert codes == [0] * ranks, "\n".join(log.read_text(errors="replace")[-4000:] for log in logs)
    found: list[dict[str, Any]] = json.loads(Path(f"{out}.0.json").read_text())
    return found


@pytest.mark.parametrize(("ranks", "gather"), [(1, "gather"), (2, "no-gather")])
def test_trainer_resumes_exactly(tmp_path: Path, ranks: int, gather: str) -> None:
    """``no-gather``: the Trainer then saves the same DeepSpeed tag twice in one save (case C2)."""
    whole = run(tmp_path, tmp_path / "whole", "whole", ranks, 1, 6, gather)
    shutil.rmtree(tmp_path / "whole" / "checkpoint-6")
    resumed = run(tmp_path, tmp_path / "whole", "resumed", ranks, 1, 6, gather, "resume")
    assert [entry["step"] for entry in whole] == [1, 2, 3, 4, 5, 6]
    assert resumed[-3:] == whole[-3:]
    manifest = tmp_path / "whole" / "checkpoint-6" / "global_step6" / "nvme_resume" / "manifest.json"
    assert json.loads(manifest.read_text())["body"]["world_size"] == ranks
