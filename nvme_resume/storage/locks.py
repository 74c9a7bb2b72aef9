"""One owner of a folder at a time, the process that holds a lock file in it.

The kernel drops the lock when that process ends, however it ends; a note beside it says who it is.  filelock, because
it knows what locks are on each system, and lets go in forked children.  On a file system without locks it falls back to
a marker file that names host and pid.  Engines of one process share what the process holds.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from filelock import FileLock, Timeout

from nvme_resume import layout
from nvme_resume.errors import LockedError
from nvme_resume.storage import disk as seam

_MAX_NOTE_BYTES = 65536


@dataclass
class _Held:
    lock: FileLock
    pid: int
    holders: int = 0


_mutex = threading.Lock()
_held: dict[str, _Held] = {}  # by absolute path of the lock file


def note() -> bytes:
    """What a note says of this process: host, pid, command, time."""
    # No arguments: others may see the note, and arguments may be secret.
    facts = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "command": Path(sys.argv[0]).name,
        "since": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    return json.dumps(facts).encode()


def owner(path: Path) -> str:
    """In words, who holds the lock file ``path`` according to the note beside it."""
    return describe(_note(path))


def describe(path: Path) -> str:
    """In words, who wrote the note ``path``."""
    try:
        said = json.loads(seam.current().read(path, _MAX_NOTE_BYTES))
        return f"process {said['pid']} on {said['host']} since {said['since']} ({said['command']})"
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return "a process that left no note"


def take_save_folder(save_dir: Path, *, hint: str) -> Lock:
    """Be the one job that writes to a save folder.  LockedError naming the owner; OSError."""
    return take(save_dir / layout.WRITER_LOCK, f"the save folder {save_dir}", hint=hint)


def is_held(path: Path) -> bool:
    """Does a living process hold the lock file ``path``?"""
    if not path.exists():
        return False
    try:
        take(path, str(path), hint="").close()
    except LockedError:
        return True
    except OSError:
        return False
    return False


class Lock:
    """One claim on a lock file; ``close`` gives it back, and the end of the process does."""

    def __init__(self, path: Path) -> None:
        self._path: str | None = str(path)
        self._pid = os.getpid()

    def close(self) -> None:
        """Give the claim back; with the last one the lock file goes."""
        path, self._path = self._path, None
        if path is None or self._pid != os.getpid():
            return
        with _mutex:
            held = _held[path]
            held.holders -= 1
            if held.holders:
                return
            del _held[path]
            # While it is still ours: whoever opened the file meanwhile sees that it has no name, and tries again.
            for name in (_note(Path(path)), Path(path)):
                with contextlib.suppress(OSError):
                    seam.current().remove_tree(name)
            held.lock.release()


def take(path: Path, what: str, *, hint: str) -> Lock:
    """Own ``what`` by the lock file ``path`` (its folder exists).  LockedError naming the owner; OSError."""
    key = os.path.abspath(path)  # noqa: PTH100 - no symbolic links resolved: the folder may be renamed
    with _mutex:
        held = _held.get(key)
        if held is None or held.pid != os.getpid():
            lock = FileLock(key, thread_local=False)
            try:
                lock.acquire(blocking=False)
            except Timeout:
                raise LockedError(
                    f"{what} belongs to another job",
                    path=key,
                    expected="no other owner",
                    found=owner(path),
                    hint=hint,
                ) from None
            held = _held[key] = _Held(lock, os.getpid())
            with contextlib.suppress(OSError):
                seam.current().remove_tree(_note(path))
                seam.current().write(_note(path), note(), sync=False)
        held.holders += 1
    return Lock(Path(key))


def _note(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(layout.OWNER_LOCK) + layout.OWNER_NOTE)
