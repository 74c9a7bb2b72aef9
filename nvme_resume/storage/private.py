"""Private folders: names for swap files that nobody else opens, owned by one process and gone with it.

A folder belongs to whoever holds the lock file beside it; the kernel drops the lock when that process ends, however it
ends.  filelock, because it knows what locks are on each system.
"""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path

from filelock import FileLock, Timeout

from nvme_resume import layout, logs
from nvme_resume.storage import disk as seam

log = logs.logger


class PrivateFolder:
    """One process's folder below ``<nvme_path>/zero_stage_3/nvme_resume``."""

    def __init__(self, root: Path) -> None:
        disk = seam.current()
        disk.make_folder(root)
        self.path = root / f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._lock = _lock(self.path)
        _try(self._lock)  # before the folder: one without a lock looks dead
        disk.make_folder(self.path)
        probe = self.path / "mode"
        disk.write(probe, b"", sync=False)
        self.file_mode = probe.stat().st_mode & 0o777
        disk.remove_tree(probe)
        self._count = 0
        self._owner = os.getpid()

    def name(self, public: Path) -> Path:
        """A new private name for a swap file."""
        self._count += 1
        return self.path / f"{self._count}-{public.name}"

    def close(self) -> None:
        """Remove the folder and what is left in it; not in a forked child, which owns nothing."""
        if os.getpid() != self._owner:
            return
        seam.current().remove_tree(self.path)
        self._lock.release()
        Path(self._lock.lock_file).unlink(missing_ok=True)


def clean(root: Path) -> None:
    """Remove the folders of processes that are gone."""
    if not root.is_dir():
        return
    for path in root.iterdir():
        if path.name.endswith(layout.OWNER_LOCK):
            _remove_lone_lock(path)
            continue
        if not path.is_dir():
            continue
        lock = _lock(path)
        if not _try(lock):
            continue
        try:
            seam.current().remove_tree(path)
            log.info("removed %s, left behind by a process that is gone", path)
        finally:
            lock.release()
            Path(lock.lock_file).unlink(missing_ok=True)


def _remove_lone_lock(path: Path) -> None:
    """Remove a lock file whose folder was not made yet, or is gone already, when its owner died.

    A living owner may have made the file and not locked it yet, so it must be known to be gone: a process of this host.
    """
    folder = path.with_name(path.name.removesuffix(layout.OWNER_LOCK))
    host, _, rest = folder.name.rpartition("-")[0].rpartition("-")
    if (
        host != socket.gethostname()
        or not rest.isdigit()
        or Path(f"/proc/{rest}").exists()
        or folder.exists()
    ):
        return
    lock = _lock(folder)
    if _try(lock):
        lock.release()
        path.unlink(missing_ok=True)


def _try(lock: FileLock) -> bool:
    """Take the lock if it is free.  On a file system without locks nobody takes any, and nothing is ever cleaned."""
    try:
        lock.acquire(blocking=False)
    except (Timeout, NotImplementedError, OSError):
        return False
    return True


def _lock(folder: Path) -> FileLock:
    return FileLock(f"{folder}{layout.OWNER_LOCK}")
