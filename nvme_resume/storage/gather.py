"""Bring the parts of one checkpoint together that nodes with disks of their own hold, or that lie under a URL.

Every node's folder has the same manifest and the files of its own ranks.  Every byte is compared with its hash on the
way, and what is there already is not moved again; ``intake`` says how parts come in.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from nvme_resume import layout
from nvme_resume.config import Options
from nvme_resume.errors import ConfigError, CorruptError, NoCheckpointError
from nvme_resume.manifest import Manifest, same_checkpoint
from nvme_resume.storage import catalog, commit, download, records, seal, transfer
from nvme_resume.storage import disk as seam
from nvme_resume.storage.intake import Intake
from nvme_resume.storage.remote import Remote


class Part(NamedTuple):
    """What one source holds of a checkpoint; ``source`` is a save folder."""

    source: Path | Remote
    head: Manifest
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return self.source.url if isinstance(self.source, Remote) else str(self.source / self.head.tag)


class Gathered(NamedTuple):
    """``moved``: bytes that came; 0 when everything was there already."""

    path: Path
    tag: str
    step: int | None
    ranks: int
    moved: int


def look(source: Path | Remote, tag: str | None) -> Part | None:
    """The part of ``tag`` (default: the newest step) in a save folder; None where it has none.

    Raises CorruptError; StorageError when a URL does not answer.
    """
    if isinstance(source, Remote):
        there = download.look(source, tag)
        return None if there is None else Part(source, there.head, there.ranks)
    names = catalog.tags(source) if tag is None else [tag]
    found = [_part(source, name) for name in names if records.has_manifest(source / name)]
    return max(found, key=lambda part: part.head.global_steps, default=None)


def _part(source: Path, tag: str) -> Part:
    head = records.read_manifest(source / tag)
    there = [r for r in range(head.world_size) if (source / tag / layout.rank_record(r)).is_file()]
    return Part(source, head, tuple(there))


def gather(
    sources: Sequence[Path | Remote], into: Path, tag: str | None, options: Options, *, show: bool
) -> Gathered:
    """Make ``into`` hold all ranks' files.  The caller owns ``into`` (``locks.take_save_folder``).

    Raises NoCheckpointError that names the ranks nobody has, ConfigError when the folders hold different checkpoints,
    CorruptError for a file that is not what was saved, NoSpaceError, StorageError, or OSError; then nothing new has
    appeared in ``into``, and what had come in part is gone on with the next time.
    """
    parts = [part for source in sources if (part := look(source, tag)) is not None]
    if not parts:
        raise NoCheckpointError(
            "no checkpoint of nvme_resume in any of the folders", tag=tag, path=", ".join(map(_name, sources))
        )
    head = max((p.head for p in parts), key=lambda h: h.global_steps)
    # The newest of one node may be older than that of another.
    parts = [part for source in sources if (part := look(source, head.tag)) is not None]
    for part in parts:
        if not same_checkpoint(part.head, head):
            raise ConfigError(
                "the folders hold different checkpoints of that tag",
                tag=head.tag,
                path=str(part),
                expected=head.checkpoint_id,
                found=part.head.checkpoint_id,
                hint="leave out the folder that belongs to another run, or name an older --tag",
            )
    target = into / head.tag
    present = look(into, head.tag)
    if present is not None and not same_checkpoint(present.head, head):
        raise ConfigError(
            "another checkpoint has that tag in the target",
            tag=head.tag,
            path=str(target),
            expected=head.checkpoint_id,
            found=present.head.checkpoint_id,
            hint="gather into an empty folder",
        )
    moved = 0
    if present is None or catalog.look(into, head.tag).problem is not None:
        moved = _bring(parts, into, head, options, show=show)
    moved += beside([part.source for part in parts], into, head.tag, options)
    return Gathered(target, head.tag, head.global_steps, head.world_size, moved)


def _bring(parts: Sequence[Part], into: Path, head: Manifest, options: Options, *, show: bool) -> int:
    inbox = Intake(into, head, "the folders that are gathered")
    try:
        missing = [rank for rank in range(head.world_size) if inbox.lacks(rank)]
        order = sorted(
            parts, key=lambda part: isinstance(part.source, Remote)
        )  # this machine's folders first
        holders = _holders(missing, order, head)
        moved = 0
        for part in order:
            ranks = [rank for rank, holder in holders.items() if holder is part]
            if isinstance(part.source, Remote):
                moved += download.bring(part.source, head, ranks, inbox, options)
                continue
            for rank in ranks:
                moved += _rank(part.source / head.tag, rank, head, inbox, options, show=show)
        inbox.publish(latest=catalog.deserves_latest(into, head.global_steps))
    except (CorruptError, NoCheckpointError):
        inbox.discard()
        raise
    finally:
        inbox.close()
    return moved


def _holders(missing: Sequence[int], parts: Sequence[Part], head: Manifest) -> dict[int, Part]:
    """Who gives which rank.  NoCheckpointError naming the ranks nobody has."""
    holders = {rank: part for part in reversed(parts) for rank in part.ranks if rank in missing}
    if nobody := [rank for rank in missing if rank not in holders]:
        hosts = sorted({entry.host for entry in head.ranks if entry.rank in nobody})
        raise NoCheckpointError(
            f"nobody has the files of ranks {nobody}",
            tag=head.tag,
            path=", ".join(map(str, parts)),
            hint=f"bring the folder of {', '.join(hosts)}",
        )
    return holders


def _rank(source: Path, rank: int, head: Manifest, inbox: Intake, options: Options, *, show: bool) -> int:
    """One rank's part from a folder on this machine."""
    of_rank = seal.read_rank(source, head, rank, options, show=show)
    needs = inbox.needs(rank, of_rank, options)
    inbox.make_room(needs)
    nbytes = inbox.copy(rank, source, needs, options, show=show)
    inbox.finish_rank(rank, of_rank)
    return nbytes


def beside(sources: Sequence[Path | Remote], into: Path, tag: str, options: Options) -> int:
    """A Trainer's files beside the tag folder, and DeepSpeed's scripts; what is there already stays as it is.

    Bytes that came, the scripts aside.  Raises StorageError, OSError.
    """
    moved = 0
    disk = seam.current()
    for source in sources:
        if isinstance(source, Remote):
            moved += download.beside(source, tag, into)
            continue
        for name in ("zero_to_fp32.py", "zero_to_torch.py"):  # for people who want plain weights
            if (source / name).is_file() and not (into / name).exists():
                shutil.copy2(source / name, into / name)
        names = catalog.beside(source, tag) if (source / layout.TRAINER_STATE).is_file() else []
        missing = [name for name in names if not (into / name).exists()]
        for parent in {(into / name).parent for name in missing}:
            disk.make_folder(parent)
        temporary = [layout.partial(into / n) for n in missing]
        copies = [transfer.Copy(source / n, t) for n, t in zip(missing, temporary, strict=True)]
        found = transfer.run(copies, options, what="files beside the tag folder", sync=True)
        for name, path in zip(missing, temporary, strict=True):
            disk.rename(path, into / name)
        commit.sync_all([], {(into / name).parent for name in missing})
        moved += sum(f.size for f in found)
    return moved


def _name(source: Path | Remote) -> str:
    return source.url if isinstance(source, Remote) else str(source)
