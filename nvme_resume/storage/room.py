"""Is there room?  Asked before anything is written, for all ranks of a host together: they share its disks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nvme_resume.errors import NoSpaceError
from nvme_resume.storage import disk as seam


class Needs:
    """Bytes that one rank needs on each file system it writes to."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._needs: dict[int, tuple[str, int]] = {}  # by file system: two folders may share one

    def add(self, where: Path, nbytes: int) -> None:
        """``nbytes`` more on the file system of the folder ``where``."""
        device = seam.current().device(where)
        first, total = self._needs.get(device, (str(where), 0))
        self._needs[device] = first, total + nbytes

    def plain(self) -> list[dict[str, Any]]:
        """What the ranks send each other, with what is free now."""
        disk = seam.current()
        return [
            {"host": self._host, "device": d, "path": p, "bytes": n, "free": disk.free_bytes(Path(p))}
            for d, (p, n) in self._needs.items()
        ]


def refuse_too_little(everyone: Sequence[Sequence[dict[str, Any]]], what: str, *, tag: str) -> None:
    """NoSpaceError, the same on every rank that asks with the same answers, when a disk is too small for all."""
    disks: dict[tuple[str, int], list[tuple[int, dict[str, Any]]]] = {}
    for rank, needs in enumerate(everyone):
        for need in needs:
            disks.setdefault((need["host"], need["device"]), []).append((rank, need))
    for found in disks.values():
        total, free = sum(n["bytes"] for _, n in found), min(n["free"] for _, n in found)
        if total > free:
            rank, first = found[0]
            ranks = f" for {len(found)} ranks of {first['host']}" if len(found) > 1 else ""
            raise NoSpaceError(
                f"no room for {what}",
                rank=rank,
                tag=tag,
                path=first["path"],
                expected=f"{total >> 20} MiB free{ranks}",
                found=f"{free >> 20} MiB",
                hint="free some space there: remove old checkpoints, or use another disk",
            )
