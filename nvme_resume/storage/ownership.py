"""The one job that saves into a folder: its lock, and what earlier jobs left there."""

from __future__ import annotations

from pathlib import Path

from nvme_resume import logs
from nvme_resume.errors import LockedError
from nvme_resume.storage import catalog, commit, locks

log = logs.logger


class Ownership:
    """The save folder that one engine, or one Trainer, writes to at present."""

    def __init__(self) -> None:
        self._owned: tuple[Path, locks.Lock] | None = None

    def take(self, save_dir: Path) -> None:
        """Be the one job that saves there, until another folder is taken.  LockedError names the other."""
        if self._owned is None or self._owned[0] != save_dir:
            lock = locks.take_save_folder(
                save_dir, hint="save to a folder of your own, or end the other job first"
            )
            self.close()
            self._owned = save_dir, lock
            commit.anchor(save_dir)
        for leftover in catalog.leftovers(save_dir):
            # Only now: while another job owned the folder they may have been its own.
            is_folder, done = leftover.is_dir(), commit.recover(leftover)
            if is_folder:
                log.warning("%s was left behind by an interrupted save: %s", leftover, done)

    def close(self) -> None:
        """Give up the save folder."""
        if self._owned is not None:
            self._owned[1].close()
            self._owned = None


def mend(save_dir: Path) -> None:
    """Give checkpoints back the names that a crash between two renames took, unless a job saves there now."""
    if not commit.lost(save_dir):
        return
    try:
        lock = locks.take_save_folder(save_dir, hint="wait for it")
    except LockedError:
        return
    try:
        for tag in commit.mend(save_dir):
            log.warning("%s was being replaced when a save died: put back", save_dir / tag)
    finally:
        lock.close()
