"""Locks of builds: stale ones are found and named, living ones are left alone."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import deepspeed.accelerator
import pytest
from torch.utils.file_baton import FileBaton

from nvme_resume import ops

NOBODY, SOMEBODY = 65534, 65533


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever disk the tests run on."""
    monkeypatch.setattr(ops, "_on_network", lambda folder: False)


def age(lock: Path, seconds: float) -> None:
    past = time.time() - seconds
    os.utime(lock, (past, past))


def make_lock(root: Path, op: str, seconds: float) -> Path:
    lock = root / "py311_cpu" / op / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    age(lock, seconds)
    return lock


def test_only_old_locks_without_a_process_are_stale(tmp_path: Path) -> None:
    stale, young, named, inside = (
        make_lock(tmp_path, op, seconds) for op, seconds in (("a", 600), ("b", 5), ("c", 600), ("d", 600))
    )
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    processes = [
        subprocess.Popen([*sleep, f"-I{named.parent}"]),
        subprocess.Popen(sleep, cwd=inside.parent),
    ]
    try:
        time.sleep(0.5)
        assert [lock.path for lock in ops.find_stale_locks(tmp_path)] == [stale]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert {lock.path for lock in ops.find_stale_locks(tmp_path)} == {stale, named, inside}
    assert young.exists()


def test_a_builder_between_two_compilers_keeps_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch links, then loads, with no compiler alive; without its lock it would die in release()."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "async_io" / "lock"
    lock.parent.mkdir()
    hold = "import sys; held = open(sys.argv[1][::-1], 'x'); print(flush=True); sys.stdin.read()"
    arguments = [sys.executable, "-c", hold, str(lock)[::-1]]  # backwards: its command line names nothing
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        age(lock, 600)
        ops.unlock()
        assert lock.exists()
        other.kill()
    assert [found.path for found in ops.find_stale_locks()] == [lock]
    ops.unlock()

    baton = FileBaton(str(lock))
    assert baton.try_acquire()
    age(lock, 600)
    ops.unlock()  # as the ticker does while this very process builds
    baton.release()


def test_a_lock_released_between_two_looks_is_not_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = make_lock(tmp_path, "async_io", 600)
    monkeypatch.setattr(ops.time, "sleep", lambda seconds: lock.unlink())
    assert ops.find_stale_locks(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to start another user's process")
def test_a_process_that_cannot_be_looked_at_may_be_the_builder() -> None:
    lock = make_lock(Path(tempfile.mkdtemp()), "async_io", 600)  # pytest's own folder is closed to others
    folders = [lock.parent, *lock.parent.parents][:3]
    try:
        for folder in folders:
            folder.chmod(0o755)
        os.chown(lock, SOMEBODY, -1)
        with subprocess.Popen(["sleep", "60"], user=SOMEBODY, cwd="/") as builder:
            os.seteuid(NOBODY)
            try:
                assert ops.find_stale_locks(folders[-1]) == []
            finally:
                os.seteuid(0)
                builder.kill()
        os.seteuid(NOBODY)
        assert [found.path for found in ops.find_stale_locks(folders[-1])] == [lock]
    finally:
        os.seteuid(0)
        lock.unlink()
        for folder in folders:
            folder.rmdir()


def test_on_a_network_disk_only_a_long_silence_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_on_network", lambda folder: True)
    quiet, busy = (make_lock(tmp_path, op, 7200) for op in ("quiet", "busy"))
    make_lock(tmp_path, "recent", 600)
    (busy.parent / "op.o").touch()
    assert [lock.path for lock in ops.find_stale_locks(tmp_path)] == [quiet]


def test_the_warning_names_file_and_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lock = make_lock(tmp_path, "async_io", 600)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with caplog.at_level(logging.WARNING, "nvme_resume"):
        ops.warn_stale_locks()
    assert str(lock) in caplog.text and "nvme_resume.ops unlock" in caplog.text
    assert ops.main(["status"]) == 1
    assert ops.main(["unlock"]) == 0
    assert not lock.exists()
    assert ops.main(["status"]) == 0
    assert ops.main(["nonsense"]) == 2


def test_the_default_folder_is_torchs_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch.utils.cpp_extension import get_default_build_root

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert ops.extensions_root() == Path(get_default_build_root())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ops.extensions_root() == Path(get_default_build_root())


class Builder:
    """Stands in for DeepSpeed's builders: real ones take minutes."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self.folder = root / name

    def load(self, verbose: bool) -> None:
        if self.name == "CPULionBuilder":
            raise RuntimeError(
                "Error building extension 'cpu_lion'\nlion.cpp:3: the reason\nninja: build stopped"
            )
        if self.name == "CPUAdagradBuilder":
            raise AssertionError
        if self.name == "CPUAdamBuilder":
            # torch would wait for the lock, but not compile once it is gone
            assert not (self.folder / "lock").exists()


@pytest.mark.timeout(60)
def test_a_build_tells_what_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Accelerator:
        def device_name(self) -> str:
            return "cuda"

        def create_op_builder(self, name: str) -> Builder:
            return Builder(name, tmp_path)

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(deepspeed.accelerator, "get_accelerator", Accelerator)
    monkeypatch.setattr(ops, "_TICK_SECONDS", 0.05)
    monkeypatch.setattr(ops, "_SETTLE_SECONDS", 0.5)  # the killed build below is younger when we begin
    (tmp_path / "AsyncIOBuilder").mkdir()
    (tmp_path / "AsyncIOBuilder" / "AsyncIOBuilder.so").touch()
    (tmp_path / "CPUAdamBuilder").mkdir()
    (tmp_path / "CPUAdamBuilder" / "lock").touch()

    assert ops.main(["build"]) == 1
    printed = capfd.readouterr()
    lines = printed.out.splitlines()
    assert lines[:2] == [
        "DeepSpeed op 1/4 AsyncIOBuilder: ready (0 s)",
        "DeepSpeed op 2/4 CPUAdamBuilder: compiling, may take minutes",
    ]
    assert any(line.startswith(f"DeepSpeed op 2/4 CPUAdamBuilder: waiting for {tmp_path}") for line in lines)
    assert "DeepSpeed op 2/4 CPUAdamBuilder: compiling, 0 s so far" in lines
    assert f"removing {tmp_path / 'CPUAdamBuilder' / 'lock'}, left by a build that died" in lines
    assert any(line.startswith("DeepSpeed op 2/4 CPUAdamBuilder: ready") for line in lines)
    assert "DeepSpeed op 3/4 CPUAdagradBuilder: FAILED: AssertionError() (0 s)" in lines
    assert lines[-1] == "DeepSpeed op 4/4 CPULionBuilder: FAILED: Error building extension 'cpu_lion' (0 s)"
    assert "lion.cpp:3: the reason" in printed.err
    assert ops.main(["status"]) == 0
    assert capfd.readouterr().out == f"built: {tmp_path / 'AsyncIOBuilder' / 'AsyncIOBuilder.so'}\n"
