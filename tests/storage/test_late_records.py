"""Seals that are added to a committed checkpoint, by several runs that may die or be slower."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from nvme_resume import layout, manifest
from nvme_resume.manifest import Seal
from nvme_resume.storage import disk as seam
from nvme_resume.storage import records

SEAL = Seal(checkpoint_id="x1", rank=0, record_digest="0" * 32, files={})
NAME = layout.seal(0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / layout.RECORDS).mkdir()
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / layout.RECORDS).iterdir())


def test_what_a_dead_run_left_goes_with_the_next_seal(folder: Path) -> None:
    half, other = (folder / layout.RECORDS / f".tmp-rank{r:02d}.seal.json.0123456789ab" for r in (0, 1))
    half.write_text("{")
    other.write_text("{")  # of another rank, which cleans up for itself
    records.write_late(folder, NAME, SEAL)
    assert names(folder) == [other.name, Path(NAME).name]
    assert records.read(folder, NAME, Seal) == SEAL


class Overtaken(seam.Disk):
    """Another run adds the same seal, and removes what it takes for a dead run's, before ours gets its name."""

    def rename(self, source: Path, target: Path) -> None:
        target.write_bytes(manifest.encode(SEAL))
        source.unlink()
        super().rename(source, target)


def test_a_slower_run_is_content_with_the_seal_of_the_other(folder: Path) -> None:
    with seam.replaced(Overtaken()):
        records.write_late(folder, NAME, SEAL)
    assert names(folder) == [Path(NAME).name]


class Full(seam.Disk):
    def write(self, path: Path, data: bytes, *, sync: bool = True) -> None:
        super().write(path, data[:3], sync=sync)
        raise OSError(errno.ENOSPC, "no space", str(path))


def test_a_failure_is_raised_and_leaves_nothing(folder: Path) -> None:
    with seam.replaced(Full()), pytest.raises(OSError, match="no space"):
        records.write_late(folder, NAME, SEAL)
    assert names(folder) == []
