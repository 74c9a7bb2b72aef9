"""Bring the parts of one checkpoint together that nodes with disks of their own hold.

Every node's folder has the same manifest and the files of its own ranks.  The parts are copied (the target's own is
linked) into a staging folder, every byte with a known hash is compared on the way, and the whole is published like any
save: a crash leaves the target as it was, and a repeated run moves only what is missing.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from nvme_resume import layout
from nvme_resume.config import Options
from nvme_resume.errors import ConfigError, CorruptError, NoCheckpointError
from nvme_resume.manifest import FileSeal, Manifest
from nvme_resume.storage import catalog, commit, ladder, records, room, transfer, verify
from nvme_resume.storage import disk as seam

_SLACK_BYTES = 16 << 20


class Part(NamedTuple):
    """What one folder holds of a checkpoint."""

    folder: Path
    head: Manifest
    ranks: tuple[int, ...]


class Gathered(NamedTuple):
    """``moved``: bytes copied or linked; 0 when everything was there already."""

    path: Path
    head: Manifest
    moved: int


def look(save_dir: Path, tag: str | None) -> Part | None:
    """The part of ``tag`` (default: the newest step) in a save folder; None where it has none.  CorruptError."""
    names = catalog.tags(save_dir) if tag is None else [tag]
    found = [_part(save_dir / name) for name in names if records.has_manifest(save_dir / name)]
    return max(found, key=lambda part: part.head.global_steps, default=None)


def _part(folder: Path) -> Part:
    head = records.read_manifest(folder)
    there = [r for r in range(head.world_size) if (folder / layout.rank_record(r)).is_file()]
    return Part(folder, head, tuple(there))


def gather(sources: Sequence[Path], into: Path, tag: str | None, options: Options, *, show: bool) -> Gathered:
    """Make ``into`` hold all ranks' files.  The caller owns ``into`` (``locks.take_save_folder``).

    Raises NoCheckpointError that names the ranks nobody has, ConfigError when the folders hold different checkpoints,
    CorruptError for a file that is not what was saved, NoSpaceError, or OSError; then ``into`` is as it was.
    """
    parts = [part for source in sources if (part := look(source, tag)) is not None]
    if not parts:
        raise NoCheckpointError(
            "no checkpoint of nvme_resume in any of the folders", tag=tag, path=", ".join(map(str, sources))
        )
    head = max((p.head for p in parts), key=lambda h: h.global_steps)
    # The newest of one node may be older than that of another.
    named = [look(source, head.tag) for source in sources]
    parts = [part for part in named if part is not None]
    for part in parts:
        if part.head != head:
            raise ConfigError(
                "the folders hold different checkpoints of that tag",
                tag=head.tag,
                path=str(part.folder),
                expected=head.checkpoint_id,
                found=part.head.checkpoint_id,
                hint="leave out the folder that belongs to another run, or name an older --tag",
            )
    target = into / head.tag
    present = look(into, head.tag)
    if present is not None and present.head != head:
        raise ConfigError(
            "another checkpoint has that tag in the target",
            tag=head.tag,
            path=str(target),
            expected=head.checkpoint_id,
            found=present.head.checkpoint_id,
            hint="gather into an empty folder",
        )
    if present is not None and catalog.look(into, head.tag).problem is None:
        return Gathered(target, head, 0)
    holders = {
        rank: part.folder
        for part in reversed([*parts, *([present] if present else [])])
        for rank in part.ranks
    }
    if missing := [rank for rank in range(head.world_size) if rank not in holders]:
        hosts = sorted({entry.host for entry in head.ranks if entry.rank in missing})
        raise NoCheckpointError(
            f"nobody has the files of ranks {missing}",
            tag=head.tag,
            path=", ".join(str(part.folder) for part in parts),
            hint=f"bring the folder of {', '.join(hosts)}",
        )
    staging = layout.staging(head.tag, head.checkpoint_id)
    try:
        moved = _fill(into, staging, head, holders, options, show=show)
        commit.publish(into, staging, head, save_latest=_is_newest(into, head))
    except BaseException:
        commit.discard(into, staging, head.checkpoint_id)
        raise
    for name in ("zero_to_fp32.py", "zero_to_torch.py"):  # DeepSpeed's, for people who want plain weights
        for part in parts:
            if (part.folder.parent / name).is_file() and not (into / name).exists():
                shutil.copy2(part.folder.parent / name, into / name)
    return Gathered(target, head, moved)


def _fill(
    into: Path, staging: str, head: Manifest, holders: dict[int, Path], options: Options, *, show: bool
) -> int:
    """All files but the manifest, durable; their bytes.  What lies in the target itself is linked."""
    disk, folder = seam.current(), into / staging
    disk.make_folder(folder / layout.RECORDS)
    copies: list[
        tuple[int, transfer.Copy, FileSeal | None]
    ] = []  # whose, what, and its hash where it is known
    nbytes = 0
    small: list[Path] = []
    for rank, source in sorted(holders.items()):
        record, seal, extras = records.read_rank(source, head, rank)
        verify.structure(source, record.files, rank=rank, tag=head.tag)
        if seal is None:
            verify.untouched(source, record.files, rank=rank, tag=head.tag)
        for name, listed in record.files.items():
            path, target = verify.path_of(source, name, rank=rank, tag=head.tag), folder / name
            if not _linked(path, target, into):
                copies.append((rank, transfer.Copy(path, target), None if seal is None else seal.files[name]))
                nbytes += listed.size
        items = {layout.rank_record(rank): record, layout.extras(rank): extras, layout.seal(rank): seal}
        for name, item in items.items():
            if item is not None:
                records.write(folder, name, item)
                small.append(folder / name)
    needs = room.Needs("this machine")
    needs.add(into, nbytes + _SLACK_BYTES, len(copies))
    room.refuse_too_little([needs.plain()], "the gathered checkpoint", tag=head.tag)
    work = [copy for _, copy, _ in copies]
    found = transfer.run(work, options, what=f"gather {head.tag}", sync=True, show=show)
    for (rank, copy, known), seen in zip(copies, found, strict=True):
        if known is not None:
            verify.compare(copy.src, known, seen, rank=rank, tag=head.tag)
    commit.sync_all(small, commit.folders_of(folder))
    return nbytes


def _linked(source: Path, target: Path, into: Path) -> bool:
    """Files of the target's own part get another name; all others are copied: their folder may be written to later."""
    seam.current().make_folder(target.parent)
    if not source.is_relative_to(into):
        return False
    try:
        seam.current().link(source, target)
    except OSError as error:
        if error.errno not in ladder.STEP_DOWN:
            raise
        return False
    return True


def _is_newest(into: Path, head: Manifest) -> bool:
    """Is ``latest`` to name it?  Not where it names a complete one of a later step."""
    with contextlib.suppress(CorruptError):
        named = catalog.latest(into)
        return named is None or named.problem is not None or named.step <= head.global_steps
    return True
