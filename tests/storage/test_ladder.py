"""Every rung on real file systems: what the probe finds, and that the bytes are the same."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from nvme_resume.storage import disk as seam
from nvme_resume.storage import ladder

# file system -> (the first rung that works within it, all that do)
KINDS = {
    "ext4": ("link", {"link", "server"}),
    "xfs": ("link", {"link", "reflink", "server"}),
    "btrfs": ("link", {"link", "reflink", "server"}),
    "tmpfs": ("link", {"link", "server"}),
}


def test_rungs_of_a_file_system(mounted: tuple[str, Path], tmp_path: Path) -> None:
    kind, place = mounted
    first, working = KINDS[kind]
    one, other, elsewhere = place / "swap", place / "ck", tmp_path / "elsewhere"
    for folder in (one, other, elsewhere):
        folder.mkdir()
    assert ladder.probe(one, other) == first
    assert ladder.probe(one, elsewhere) == "direct"
    source = one / "file"
    source.write_bytes(content := os.urandom(100_000))
    for rung in ladder.RUNGS[:-1]:
        target = other / rung
        try:
            ladder.put(rung, source, target, len(content))
        except OSError as error:
            assert rung not in working
            assert error.errno in ladder.STEP_DOWN
        else:
            assert rung in working
            assert target.read_bytes() == content
            assert (target.stat().st_ino == source.stat().st_ino) == (rung == "link")
    assert sorted(p.name for p in one.iterdir()) == ["file"]  # the probes left nothing


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_failing_disk_is_no_reason_to_try_another_rung(tmp_path: Path, code: int) -> None:
    class Failing(seam.Disk):
        def link(self, source: Path, target: Path) -> None:
            raise OSError(code, os.strerror(code), str(target))

    with seam.replaced(Failing()), pytest.raises(OSError, match=os.strerror(code)):
        ladder.probe(tmp_path, tmp_path)
    assert not list(tmp_path.iterdir())


def test_where_links_are_forbidden_the_next_rung_is_found(tmp_path: Path) -> None:
    class NoLinks(seam.Disk):
        def link(self, source: Path, target: Path) -> None:
            raise OSError(errno.EPERM, "Operation not permitted", str(target))

    with seam.replaced(NoLinks()):
        assert ladder.probe(tmp_path, tmp_path) in ("reflink", "server", "direct")
