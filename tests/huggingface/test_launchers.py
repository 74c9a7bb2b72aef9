"""``nvme_resume.run`` behind the launchers that people have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT, free_port
from tests.huggingface import runs

BESIDE = Path(sys.executable).parent
LAUNCHERS = {
    "python": [sys.executable],
    "torchrun": ["torchrun", "--nproc_per_node", "2", "--master_port", "PORT"],
    "deepspeed": ["deepspeed", "--num_gpus", "2", "--master_port", "PORT", "--module"],
    "accelerate": ["accelerate", "launch", "--cpu", "--num_processes", "1", "--num_machines", "1",
                   "--mixed_precision", "no", "--dynamo_backend", "no"],
}  # fmt: skip
SCRIPT = """
import sys
import tests.huggingface.program as program
print("called with", sys.argv, __name__)
program.main(sys.argv[-1])
"""


@pytest.mark.parametrize(
    "launcher",
    [
        "python",
        "deepspeed",
        pytest.param("torchrun", marks=pytest.mark.huggingface),
        pytest.param("accelerate", marks=pytest.mark.huggingface),
    ],
)
def test_a_script_is_run_as_it_is(tmp_path: Path, launcher: str) -> None:
    case = {"deepspeed": False, "out": str(tmp_path / "out"), "steps": 2, "arguments": {"save_steps": 2}}
    (tmp_path / "case.json").write_text(json.dumps(case))
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    first, *rest = [a if a != "PORT" else str(free_port()) for a in LAUNCHERS[launcher]]
    command = [first if first == sys.executable else str(BESIDE / first), *rest]
    if "--module" not in rest:
        command.append("-m")
    arguments = ["--flag", "--level=3", str(tmp_path / "case.json")]
    done = subprocess.run(
        [*command, "nvme_resume.run", str(script), *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "'--flag', '--level=3', " in done.stdout and "__main__" in done.stdout
    assert ("--local_rank=" in done.stdout) == (launcher == "deepspeed")
    assert "committed" in done.stderr + done.stdout
    assert runs.checkpoints(tmp_path / "out") == ["checkpoint-2"]
