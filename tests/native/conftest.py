"""Folders on a disk and in memory, and a guard that takes injected faults away after each test."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvme_resume import _native

MEMORY = Path("/dev/shm")


def does_direct_io(folder: Path) -> bool:
    """Whether a small file there can be read through O_DIRECT, according to the copier itself."""
    probe = folder / "probe"
    probe.write_bytes(bytes(4096))
    try:
        _native.Transfer([_native.Job(str(probe))], direct="on").run()
    except OSError:
        return False
    finally:
        probe.unlink()
    return True


@pytest.fixture(scope="session")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder on a file system with O_DIRECT: the temporary one, else beside the working directory."""
    folder = tmp_path_factory.mktemp("disk")
    if not does_direct_io(folder):
        pytest.skip(f"{folder} is on a file system without O_DIRECT; use --basetemp")
    return folder


@pytest.fixture(scope="session")
def memory() -> Iterator[Path]:
    """A folder on tmpfs, which has no O_DIRECT."""
    if not os.access(MEMORY, os.W_OK):
        pytest.skip("/dev/shm is not writable")
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield Path(folder)


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=request.getfixturevalue(request.param)) as folder:
        yield Path(folder)


@pytest.fixture(params=["threads", "libaio"])
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["auto", "off"])
def direct(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def no_faults_left() -> Iterator[None]:
    yield
    _native._testing_faults([])
    _native._testing_kill_at(0)
