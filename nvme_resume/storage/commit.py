"""Make a finished staging folder the checkpoint, durably and at once.

Order, and why: (1) all data files and records are already fsynced by whoever wrote them, and so are the
folders that hold them; (2) the manifest is written last and fsynced with its folder, so a folder with a manifest is
complete (the new ``latest``, still under another name, goes along);
(3) one rename puts the folder under its tag, two folders change names when the tag exists, so there is no
instant without a complete checkpoint under that name; (4) the parent folder is fsynced, so the rename
survives a power failure; (5) only then ``latest`` is replaced, by one more rename.

When a step fails, those before it are taken back as far as the disk still allows: a save that raises has changed
nothing.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from pathlib import Path

from nvme_resume import layout
from nvme_resume.errors import NvmeResumeError
from nvme_resume.manifest import Manifest, encode
from nvme_resume.storage import catalog, records
from nvme_resume.storage import disk as seam

_SYNC_THREADS = 4


def sync_all(files: Iterable[Path], folders: Iterable[Path]) -> None:
    """fsync files and folders, all at once: a journal commits many as fast as one.

    Every entry must be in its folder already; then the order among them does not matter, as nothing refers to any of
    them until all are durable.  Raises the first OSError.
    """
    disk = seam.current()
    work = [*((disk.sync_file, f) for f in files), *((disk.sync_folder, f) for f in folders)]
    if len(work) == 1:
        work[0][0](work[0][1])
        return
    # Threads of this call alone: an executor kept for later would end before the last save at exit does.
    errors: list[BaseException] = []
    pending = iter(work)
    lock = threading.Lock()

    def drain() -> None:
        while True:
            with lock:
                item = next(pending, None)
            if item is None or errors:
                return
            try:
                item[0](item[1])
            except OSError as error:
                errors.append(error)

    threads = []
    with contextlib.suppress(RuntimeError):  # no new threads while the interpreter ends
        for _ in range(min(_SYNC_THREADS, len(work)) - 1):
            thread = threading.Thread(target=drain, daemon=True)
            thread.start()
            threads.append(thread)
    drain()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def folders_of(folder: Path) -> list[Path]:
    """``folder`` and every folder below it."""
    return [Path(root) for root, _, _ in os.walk(folder)]


def anchor(save_dir: Path) -> None:
    """Make the save folder's own name durable, and those of the folders above it on the same file system.

    They may be as new as the first checkpoint; without them a power failure takes it along, synced or not.
    """
    disk = seam.current()
    folder = save_dir.resolve()
    while folder != folder.parent and disk.device(folder) == disk.device(folder.parent):
        folder = folder.parent
        with contextlib.suppress(PermissionError):  # a folder we may not read is none that was made for us
            disk.sync_folder(folder)


def publish(save_dir: Path, staging: str, manifest: Manifest, *, save_latest: bool) -> Path:
    """Steps 2 to 5 of the module's docstring; returns the final path.  OSError when a step failed."""
    disk = seam.current()
    source, target = save_dir / staging, save_dir / manifest.tag
    latest = save_dir / f"{layout.STAGING_PREFIX}{layout.LATEST}.{manifest.checkpoint_id}"
    names = _Names(save_dir / layout.retired(manifest.tag, manifest.checkpoint_id))
    pointed = False
    try:
        named = _named_now(save_dir) if save_latest else None
        disk.write(source / layout.manifest(), encode(manifest), sync=False)
        if save_latest:
            disk.write(latest, manifest.tag.encode(), sync=False)
        sync_all([source / layout.manifest(), *([latest] if save_latest else [])], [source / layout.RECORDS])
        names.give(source, target)
        disk.sync_folder(save_dir)
        if save_latest:
            disk.rename(latest, save_dir / layout.LATEST)
            pointed = True
            disk.sync_folder(save_dir)
    except OSError:
        # In this order: ``latest`` must never name a tag that is gone.
        with contextlib.suppress(OSError):
            if pointed:
                _name_again(save_dir, latest, named)
            if not names.take_back(source, target):
                raise
            # Half a manifest would keep ``discard`` from knowing the folder for this save's.
            disk.remove_tree(source / layout.manifest())
        with contextlib.suppress(OSError):
            disk.remove_tree(latest)
        raise
    names.remove_replaced()
    return target


def move_in(source: Path, target: Path, save_id: str) -> None:
    """Steps 3 and 4 for a finished folder that lies in a staging folder beside ``target``.

    Everything in it is durable already.  OSError when a step failed; then nothing has changed its name.
    """
    names = _Names(target.with_name(layout.retired(target.name, save_id)))
    try:
        names.give(source, target)
        sync_all([], {source.parent, target.parent})
    except OSError:
        with contextlib.suppress(OSError):
            names.take_back(source, target)
        raise
    names.remove_replaced()


class _Names:
    """The change of names that makes a staging folder the checkpoint, and how to take it back."""

    def __init__(self, retired: Path) -> None:
        self._retired = retired
        self._replaced: Path | None = None
        self._exchanged = self._moved = False

    def give(self, source: Path, target: Path) -> None:
        disk = seam.current()
        if not target.exists():
            disk.rename(source, target)
        elif disk.exchange(source, target):
            self._replaced, self._exchanged = source, True
        else:
            # No RENAME_EXCHANGE here (NFS, some FUSE): two renames; a crash between them leaves the old
            # checkpoint under a name that the next start recognises.
            self._replaced = self._retired
            disk.rename(target, self._retired)
            disk.rename(source, target)
        self._moved = True

    def take_back(self, source: Path, target: Path) -> bool:
        """False when the exchange cannot be undone.  Raises OSError."""
        disk = seam.current()
        if self._exchanged:
            return disk.exchange(source, target)
        if self._moved:
            disk.rename(target, source)
        if self._replaced is not None and self._replaced.exists():
            disk.rename(self._replaced, target)
        return True

    def remove_replaced(self) -> None:
        """What was replaced goes.  A failure is not worth an error: the next save removes what is left."""
        if self._replaced is None:
            return
        with contextlib.suppress(OSError):
            if self._exchanged:
                seam.current().remove_tree(self._replaced)  # the exchange is durable by now
            else:
                _remove(self._replaced)


def _named_now(save_dir: Path) -> bytes | None:
    """What is in ``latest``, to the byte; None when there is no such file."""
    path = save_dir / layout.LATEST
    return seam.current().read(path, catalog.LONGEST_LATEST) if path.is_file() else None


def _name_again(save_dir: Path, temporary: Path, named: bytes | None) -> None:
    """Give ``latest`` its former content back.  No fsync: one has just failed, or the disk is full."""
    disk = seam.current()
    if named is None:
        disk.remove_tree(save_dir / layout.LATEST)
    else:
        disk.write(temporary, named, sync=False)
        disk.rename(temporary, save_dir / layout.LATEST)


def _remove(leftover: Path) -> None:
    """Remove what is no checkpoint, when it is durably none.

    Some process may have been killed between a rename and its fsync: a power failure now must not bring back the names
    of before for a folder that is half empty.  Nor may ``mend`` give such a folder its old tag again.
    """
    disk = seam.current()
    disk.sync_folder(leftover.parent)
    if layout.retired_tag(leftover.name) is not None:
        going = leftover.with_name(layout.removed(leftover.name))
        disk.rename(leftover, going)
        disk.sync_folder(going.parent)
        leftover = going
    disk.remove_tree(leftover)


def discard(save_dir: Path, staging: str, checkpoint_id: str) -> None:
    """Remove an unpublished staging folder (a failure to do so is not worth another error).

    A folder there with another checkpoint's manifest is an older checkpoint that could not be put back: it stays.
    """
    folder = save_dir / staging
    try:
        # Not has_manifest: a folder that failed half-way has seals and no manifest, as a damaged checkpoint has.
        published = (folder / layout.manifest()).is_file()
        if published and records.read_manifest(folder).checkpoint_id != checkpoint_id:
            return
        _remove(folder)
    except (OSError, NvmeResumeError):
        return


def mend(save_dir: Path) -> list[str]:
    """Give checkpoints their name back that a crash between two renames left without; the tags."""
    found = [(leftover, leftover.parent / str(_lost_tag(leftover))) for leftover in lost(save_dir)]
    for leftover, _ in found:
        recover(leftover)
    return [target.name for _, target in found]


def lost(save_dir: Path) -> list[Path]:
    """Checkpoints that a crash between two renames left without their name."""
    return [p for p in catalog.leftovers(save_dir) if _lost_tag(p) is not None]


def recover(leftover: Path) -> str:
    """Deal with what an interrupted save left; says what was done.

    A replaced checkpoint whose tag is missing gets its name back, all else goes.
    """
    tag = _lost_tag(leftover)
    if tag is not None:
        seam.current().rename(leftover, leftover.parent / tag)
        return f"put back as {tag}"
    _remove(leftover)
    return "removed"


def _lost_tag(leftover: Path) -> str | None:
    """The tag of a replaced checkpoint (ours or plain DeepSpeed's) that nothing has taken the place of."""
    tag = layout.retired_tag(leftover.name)
    return tag if tag is not None and not (leftover.parent / tag).exists() else None
