"""How a swap file gets into a checkpoint: the first rung that works between the two folders.

link: another name for the same inode, nothing is copied.  reflink: FICLONE, blocks are shared until one side writes.
server: copy_file_range, the file system or file server copies.  direct: the native copier.  What works depends on both
folders and cannot be told from their names, so it is tried with two small files.
"""

from __future__ import annotations

import contextlib
import errno
import uuid
from pathlib import Path
from typing import Literal

from nvme_resume.storage import disk as seam

Rung = Literal["link", "reflink", "server", "direct"]
RUNGS: tuple[Rung, ...] = ("link", "reflink", "server", "direct")

# Errors that mean "not between these two files": the next rung may work.  EIO and ENOSPC are none of them.
STEP_DOWN = frozenset(
    {
        errno.EXDEV,
        errno.EPERM,  # no links here, or fs.protected_hardlinks
        errno.EACCES,
        errno.EMLINK,
        errno.EOPNOTSUPP,
        errno.ENOTTY,
        errno.EINVAL,
        errno.ENOSYS,
        errno.EBADF,
        errno.ETXTBSY,
    }
)
_PROBE_BYTES = 4096


def probe(private: Path, target: Path) -> Rung:
    """The first rung that works from files in ``private`` to files in ``target`` (both are written to).

    Raises OSError when even a small file cannot be written.
    """
    disk = seam.current()
    name = f".tmp-probe.{uuid.uuid4().hex[:12]}"
    source, copy = private / name, target / f"{name}.copy"
    disk.write(source, b"\0" * _PROBE_BYTES, sync=False)
    try:
        for rung in RUNGS[:-1]:
            with contextlib.suppress(FileNotFoundError):
                copy.unlink()
            try:
                put(rung, source, copy, _PROBE_BYTES)
            except OSError as error:
                if error.errno not in STEP_DOWN:
                    raise
            else:
                return rung
        return "direct"
    finally:
        # A small file that stays is no reason to fail: the next save, or the next start, removes it.
        for path in (source, copy):
            with contextlib.suppress(OSError):
                disk.remove_tree(path)


def put(rung: Rung, source: Path, target: Path, size: int) -> None:
    """One file by one rung (not ``direct``: that is ``transfer``'s).  OSError in STEP_DOWN: try another."""
    disk = seam.current()
    if rung == "link":
        disk.link(source, target)
    elif rung == "reflink":
        disk.clone(source, target)
    elif rung == "server":
        disk.server_copy(source, target, size)
    else:
        raise ValueError(rung)
