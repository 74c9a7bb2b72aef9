"""Make a finished staging folder the checkpoint, durably and at once.

Order, and why: (1) all data files and records are already fsynced by whoever wrote them, and so are the
folders that hold them; (2) the manifest is written last and fsynced, so a folder with a manifest is complete;
(3) one rename puts the folder under its tag, two folders change names when the tag exists, so there is no
instant without a complete checkpoint under that name; (4) the parent folder is fsynced, so the rename
survives a power failure; (5) only then ``latest`` is replaced, by a file that is fsynced before its rename.
"""

from __future__ import annotations

import os
from pathlib import Path

from nvme_resume import layout
from nvme_resume.manifest import Manifest, encode
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
    if not target.exists():
        disk.rename(source, target)
    elif disk.exchange(source, target):
        replaced = source
    else:
        # No RENAME_EXCHANGE here (NFS, some FUSE): two renames; a crash between them leaves the old
        # checkpoint under a name that the next start recognises.
        replaced = save_dir / layout.retired(manifest.tag, manifest.checkpoint_id)
        disk.rename(target, replaced)
        disk.rename(source, target)
    disk.sync_folder(save_dir)
    if save_latest:
        write_latest(save_dir, manifest.tag, manifest.checkpoint_id)
    if replaced is not None:
        disk.remove_tree(replaced)
    return target


def write_latest(save_dir: Path, tag: str, save_id: str) -> None:
    """Replace ``latest`` atomically and durably."""
    disk = seam.current()
    temporary = save_dir / f"{layout.STAGING_PREFIX}{layout.LATEST}.{save_id}"
    disk.write(temporary, tag.encode())
    disk.rename(temporary, save_dir / layout.LATEST)
    disk.sync_folder(save_dir)


def discard(save_dir: Path, staging: str) -> None:
    """Remove an unpublished staging folder (a failure to do so is not worth another error)."""
    try:
        seam.current().remove_tree(save_dir / staging)
    except OSError:
        return
