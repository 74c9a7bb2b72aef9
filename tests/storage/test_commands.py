"""``nvme-resume last``, ``verify`` and ``inspect`` in real processes: text, JSON, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT
from tests.storage.test_catalog import make


def nvme_resume(*arguments: str | Path) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", "from nvme_resume.cli import main; main()", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def save_dir(tmp_path: Path) -> Path:
    for step in (1, 2):
        make(tmp_path, f"t{step}", step)
    return tmp_path


def test_last(save_dir: Path) -> None:
    assert nvme_resume("last", save_dir) == (0, f"{save_dir / 't2'}\n", "")
    (save_dir / "t2" / "model1.pt").unlink()
    code, text, said = nvme_resume("last", save_dir)
    assert (code, text) == (3, f"{save_dir / 't1'}\n")
    assert "model1.pt" in said
    code, text, _ = nvme_resume("last", save_dir, "--json")
    assert (code, json.loads(text)["tag"]) == (3, "t1")
    code, text, said = nvme_resume("last", save_dir / "t1")
    assert (code, text) == (10, "") and "no complete checkpoint" in said


def test_verify(save_dir: Path) -> None:
    code, text, _ = nvme_resume("verify", save_dir / "t1")
    assert code == 0 and "good" in text and "2 ranks without hashes" in text
    (save_dir / "t1" / "optim0.pt").write_bytes(b"short")
    code, text, said = nvme_resume("verify", save_dir / "t1")
    assert (code, text) == (12, "") and "optim0.pt" in said and "rank 0" in said
    code, text, _ = nvme_resume("verify", save_dir / "t1", "--json")
    assert code == 12 and json.loads(text)["error"] == "CorruptError"
    assert nvme_resume("verify", save_dir)[0] == 10


def test_inspect(save_dir: Path) -> None:
    code, text, _ = nvme_resume("inspect", save_dir, "--json")
    assert code == 0
    assert [(c["tag"], c["step"], c["latest"]) for c in json.loads(text)["checkpoints"]] == [
        ("t2", 2, True),
        ("t1", 1, False),
    ]
    code, text, _ = nvme_resume("inspect", save_dir)
    assert code == 0 and "t2 (latest)" in text and "complete" in text
    (save_dir / "t1" / "model1.pt").unlink()
    code, text, _ = nvme_resume("inspect", save_dir)
    assert code == 3 and "[rank 1" in text  # not taken for markup
    code, text, _ = nvme_resume("inspect", save_dir / "t2", "--json")
    assert code == 0 and [r["sealed"] for r in json.loads(text)["ranks"]] == [False, False]
    assert nvme_resume("inspect", save_dir / "nothing")[0] == 10
