"""Fixtures that several folders of tests use."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

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
