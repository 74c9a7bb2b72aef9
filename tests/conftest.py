"""Fixtures that several folders of tests use."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import object_store

SIZE = 1 << 30  # of the sparse image; small state, but xfs and btrfs want room for themselves


@pytest.fixture(params=["ext4", "xfs", "btrfs", "tmpfs"])
def mounted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """(kind, folder): a fresh file system of each kind, in an image; skipped where it cannot be mounted."""
    kind: str = request.param
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    if kind != "tmpfs" and not shutil.which(f"mkfs.{kind}"):
        pytest.skip(f"mkfs.{kind} is not installed")
    place = tmp_path / "mount"
    place.mkdir()
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", str(place)]
    else:
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(SIZE)
        subprocess.run([f"mkfs.{kind}", "-q", str(image)], check=True)
        command = ["mount", "-o", "loop", str(image), str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount {kind}: {done.stderr.strip()}")
    try:
        yield kind, place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[object_store.Server]:
    """One server for all tests of a process."""
    server = object_store.start()
    yield server
    server.kill()


@pytest.fixture
def bucket(s3_server: object_store.Server, monkeypatch: pytest.MonkeyPatch) -> object_store.Bucket:
    """A fresh bucket; this process and its children know the way there."""
    for key, value in {**object_store.KEYS, "AWS_ENDPOINT_URL": s3_server.endpoint}.items():
        monkeypatch.setenv(key, value)
    return object_store.Bucket(s3_server, f"b{uuid.uuid4().hex[:12]}")


@pytest.fixture(params=["s3", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> object_store.Bucket | object_store.Folder:
    """Somewhere to upload to, by each protocol that is tested."""
    if request.param == "file":
        return object_store.Folder(tmp_path / "store")
    bucket: object_store.Bucket = request.getfixturevalue("bucket")
    return bucket
