"""Two jobs on one nvme_path, or on one save folder: the second is refused, by name, and nothing is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import harness

PROGRAM = """
import os, sys, time
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
nvme, ck, how, end = sys.argv[2:]
import deepspeed, torch
from tests import harness, training
import nvme_resume
case = {**harness.DEFAULTS, "nvme_path": nvme, "layers": 1, "mode": "stock" if how == "install" else "ours"}
if how == "install":
    nvme_resume.install()
try:
    engine = training.make_engine(case)
    training.train(case, engine, 0, 0, 2)
    engine.save_checkpoint(ck)
    print("saved", flush=True)
    if end == "wait":
        sys.stdin.readline()
        training.train(case, engine, 0, 2, 3)
        engine.save_checkpoint(ck)
        print("again", flush=True)
except nvme_resume.NvmeResumeError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
os._exit(0)
"""


def job(nvme: Path, ck: Path, how: str, end: str = "now") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(harness.free_port()), str(nvme), str(ck), how, end],
        cwd=harness.ROOT,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def said(process: subprocess.Popen[str], *starts: str) -> str:
    """The next line that begins with one of these (DeepSpeed prints there, too)."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(starts):
            return line
    raise AssertionError("it ended without a word")


WORDS = ("saved", "again", "LockedError", "StorageError")


@pytest.fixture(params=["install", "wrap"])
def first(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, subprocess.Popen[str]]:
    process = job(tmp_path / "nvme", tmp_path / "ck", request.param, "wait")
    assert said(process, *WORDS) == "saved\n"
    request.addfinalizer(process.kill)
    return request.param, process


def test_one_nvme_path(tmp_path: Path, first: tuple[str, subprocess.Popen[str]]) -> None:
    """install() refuses the second before it writes; wrap() comes after that, so the first is told."""
    how, process = first
    second = job(tmp_path / "nvme", tmp_path / "other", how)
    text = said(second, *WORDS)
    assert text.startswith("LockedError") and f"process {process.pid} on" in text and "nvme_path" in text
    second.wait()
    assert not (tmp_path / "other").exists()
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    text = said(process, *WORDS)
    if how == "install":
        assert text == "again\n"
    else:
        assert "another job has written to the swap files" in text and f"process {second.pid} on" in text
        assert (tmp_path / "ck" / "latest").read_text() == "global_step2"
    # The lock ends with its owner, and so does what was said to it.
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert said(job(tmp_path / "nvme", tmp_path / "ck", how), *WORDS) == "saved\n"


def test_one_save_folder(tmp_path: Path, first: tuple[str, subprocess.Popen[str]]) -> None:
    how, process = first
    if how == "install":
        pytest.skip("the same code as with wrap")
    text = said(job(tmp_path / "nvme2", tmp_path / "ck", how), *WORDS)
    assert text.startswith("LockedError") and f"process {process.pid} on" in text and "save folder" in text
    assert sorted(p.name for p in (tmp_path / "ck").iterdir() if p.is_dir()) == ["global_step2"]
    prune = subprocess.run(
        [
            sys.executable,
            "-c",
            "from nvme_resume.cli import main; main()",
            "prune",
            tmp_path / "ck",
            "--keep-last=1",
        ],
        cwd=harness.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert prune.returncode == 11 and f"process {process.pid} on" in prune.stderr
    process.send_signal(signal.SIGTERM)
    process.wait()
    time.sleep(0.1)
    assert said(job(tmp_path / "nvme2", tmp_path / "ck", how), *WORDS) == "saved\n"
