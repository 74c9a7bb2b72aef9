"""Is there room, in bytes and in files, and may we write?  Asked before anything is written, for all ranks of a host
together: they share its disks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nvme_resume import layout
from nvme_resume.errors import NoSpaceError, NvmeResumeError, StorageError, from_os_error
from nvme_resume.storage import disk as seam

_PROBE_BYTES = 1 << 20


class Needs:
    """Bytes and files that one rank needs on each file system it writes to."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._needs: dict[int, tuple[str, int, int]] = {}  # by file system: two folders may share one

    def add(self, where: Path, nbytes: int, files: int) -> None:
        """``nbytes`` in ``files`` more on the file system of the folder ``where``.

        Raises StorageError where this rank may not write.
        """
        if not seam.current().writable(where):
            raise StorageError(
                "this process may not write here",
                path=str(where),
                expected="a folder it can make files in",
                found="no permission, or a read-only file system",
                hint="look at the owner and mode of the folder, and at how it is mounted",
            )
        device = seam.current().device(where)
        first, total, count = self._needs.get(device, (str(where), 0, 0))
        self._needs[device] = first, total + nbytes, count + files

    def plain(self) -> list[dict[str, Any]]:
        """What the ranks send each other, with what is free now."""
        disk = seam.current()
        return [
            {
                "host": self._host,
                "device": device,
                "path": path,
                "bytes": nbytes,
                "free": disk.free_bytes(Path(path)),
                "files": files,
                "free_files": disk.free_files(Path(path)),
            }
            for device, (path, nbytes, files) in self._needs.items()
        ]


def why_not(folder: Path, what: str) -> NvmeResumeError:
    """The error for a file that others could not write into ``folder`` without saying why: the disk is asked again."""
    disk = seam.current()
    probe = folder / f"{layout.STAGING_PREFIX}probe"
    try:
        disk.write(probe, bytes(_PROBE_BYTES))
    except OSError as error:
        return from_os_error(error, what)
    finally:
        with contextlib.suppress(OSError):
            disk.remove_tree(probe)
    return StorageError(what, path=str(folder), hint="look at the disk, then try again")


def refuse_too_little(everyone: Sequence[Sequence[dict[str, Any]]], what: str, *, tag: str) -> None:
    """NoSpaceError, the same on every rank that asks with the same answers, when a disk is too small for all."""
    disks: dict[tuple[str, int], list[tuple[int, dict[str, Any]]]] = {}
    for rank, needs in enumerate(everyone):
        for need in needs:
            disks.setdefault((need["host"], need["device"]), []).append((rank, need))
    for found in disks.values():
        files = sum(n["files"] for _, n in found)
        inodes = min((n["free_files"] for _, n in found if n["free_files"] is not None), default=None)
        total, free = sum(n["bytes"] for _, n in found), min(n["free"] for _, n in found)
        if inodes is not None and files > inodes:
            problem, expected, left = "too few inodes", f"{files} free", str(inodes)
            hint = "remove some files there (df -i), or use another disk"
        elif total > free:
            problem, expected, left = "no room", f"{total >> 20} MiB free", f"{free >> 20} MiB"
            hint = "free some space there: remove old checkpoints, or use another disk"
        else:
            continue
        rank, first = found[0]
        ranks = f" for {len(found)} ranks of {first['host']}" if len(found) > 1 else ""
        raise NoSpaceError(
            f"{problem} for {what}",
            rank=rank,
            tag=tag,
            path=first["path"],
            expected=f"{expected}{ranks}",
            found=left,
            hint=hint,
        )
