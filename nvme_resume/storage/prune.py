"""Rotation: remove old checkpoints, never one that is needed.

A checkpoint goes in one rename to a name that marks it as a leftover, so it is there as a whole or not at all; what a
crash leaves of its removal goes at the next save or prune.
"""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path

from nvme_resume import layout
from nvme_resume.storage import catalog
from nvme_resume.storage import disk as seam


def outdated(save_dir: Path, keep_last: int, share: catalog.Share = range) -> list[catalog.Entry]:
    """Complete checkpoints of ours beyond the newest ``keep_last`` (by step, then by time), oldest first.

    Not the one that ``latest`` names, not plain DeepSpeed's, and not damaged ones: those are for people to look at.
    """
    if keep_last < 1:
        raise ValueError("keep_last must be 1 or more")
    complete = [e for e in catalog.others(save_dir, share) if e.problem is None]
    named = catalog.read_latest(save_dir)
    return [e for e in complete[keep_last:] if e.tag != named][::-1]


def prune(save_dir: Path, keep_last: int, share: catalog.Share = range) -> list[str]:
    """Remove what ``outdated`` lists, by whoever holds the folder's lock; the tags.  Raises OSError."""
    removed = []
    for entry in outdated(save_dir, keep_last, share):
        if catalog.is_used(save_dir / entry.tag):
            continue  # the next rotation takes it
        remove(save_dir, entry.tag)
        removed.append(entry.tag)
    return removed


def remove(save_dir: Path, tag: str) -> None:
    """Remove one checkpoint at once: after a crash at any instant it is whole, or no checkpoint at all."""
    disk = seam.current()
    folder = save_dir / layout.staging(tag, f"{uuid.uuid4().hex[:12]}.removed")
    catalog.under_way.add(folder)  # a save of this process must not take it for a dead one's
    try:
        disk.rename(save_dir / tag, folder)
        # Before its files go: a power failure must not bring back the name of a folder that is half empty.
        disk.sync_folder(save_dir)
        with contextlib.suppress(OSError):  # it is gone already; the next save removes what is left
            disk.remove_tree(folder)
    finally:
        catalog.under_way.discard(folder)
