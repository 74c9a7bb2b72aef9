"""Make a finished staging folder the checkpoint, durably and at once.

Order, and why: (1) all data files and records are already fsynced by whoever wrote them, and so are the
folders that hold them; (2) the manifest is written last and fsynced, so a folder with a manifest is complete;
(3) one rename puts the folder under its tag, two folders change names when the tag exists, so there is no
instant without a complete checkpoint under that name; (4) the parent folder is fsynced, so the rename
survives a power failure; (5) only then ``latest`` is replaced, by a file that is fsynced before its rename.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from nvme_resume import layout
from nvme_resume.errors import NvmeResumeError
from nvme_resume.manifest import Manifest, encode
from nvme_resume.storage import catalog, records
from nvme_resume.storage import disk as seam


def sync_tree(folder: Path) -> None:
    """fsync every folder below and including ``folder``, children first."""
    for root, _, _ in os.walk(folder, topdown=False):
        seam.current().sync_folder(Path(root))


def publish(save_dir: Path, staging: str, manifest: Manifest, *, save_latest: bool) -> Path:
    """Steps 2 to 5 of the module's docstring; returns the final path.  OSError when a step failed."""
    disk = seam.current()
    source, target = save_dir / staging, save_dir / manifest.tag
    disk.write(source / layout.manifest(), encode(manifest))
    disk.sync_folder(source / layout.RECORDS)
    disk.sync_folder(source)
    replaced: Path | None = None
    exchanged = moved = False
    try:
        if not target.exists():
            disk.rename(source, target)
        elif disk.exchange(source, target):
            replaced, exchanged = source, True
        else:
            # No RENAME_EXCHANGE here (NFS, some FUSE): two renames; a crash between them leaves the old
            # checkpoint under a name that the next start recognises.
            replaced = save_dir / layout.retired(manifest.tag, manifest.checkpoint_id)
            disk.rename(target, replaced)
            disk.rename(source, target)
        moved = True
        disk.sync_folder(save_dir)
        if save_latest:
            write_latest(save_dir, manifest.tag, manifest.checkpoint_id)
    except OSError:
        # Back to the state before, unless ``latest`` already names a tag that would be gone then.
        if replaced is not None or catalog.read_latest(save_dir) != manifest.tag:
            with contextlib.suppress(OSError):
                if exchanged:
                    disk.exchange(source, target)
                else:
                    if moved:
                        disk.rename(target, source)
                    if replaced is not None and replaced.exists():
                        disk.rename(replaced, target)
        raise
    if replaced is not None:
        with contextlib.suppress(OSError):  # committed all the same; the next save removes what is left
            disk.remove_tree(replaced)
    return target


def write_latest(save_dir: Path, tag: str, save_id: str) -> None:
    """Replace ``latest`` atomically and durably."""
    disk = seam.current()
    temporary = save_dir / f"{layout.STAGING_PREFIX}{layout.LATEST}.{save_id}"
    try:
        disk.write(temporary, tag.encode())
        disk.rename(temporary, save_dir / layout.LATEST)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    disk.sync_folder(save_dir)


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
        seam.current().remove_tree(folder)
    except (OSError, NvmeResumeError):
        return


def mend(save_dir: Path) -> list[str]:
    """Give checkpoints their name back that a crash between two renames left without; the tags."""
    lost = [(p, tag) for p in catalog.leftovers(save_dir) if (tag := _lost_tag(p)) is not None]
    for leftover, _ in lost:
        recover(leftover)
    return [tag for _, tag in lost]


def recover(leftover: Path) -> str:
    """Deal with what an interrupted save left; says what was done.

    A replaced checkpoint whose tag is missing gets its name back, all else goes.
    """
    tag = _lost_tag(leftover)
    if tag is not None:
        seam.current().rename(leftover, leftover.parent / tag)
        return f"put back as {tag}"
    seam.current().remove_tree(leftover)
    return "removed"


def _lost_tag(leftover: Path) -> str | None:
    """The tag of a replaced checkpoint (ours or plain DeepSpeed's) that nothing has taken the place of."""
    tag = layout.retired_tag(leftover.name)
    return tag if tag is not None and not (leftover.parent / tag).exists() else None
