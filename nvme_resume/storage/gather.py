"""Bring the parts of one checkpoint together that nodes with disks of their own hold, or that lie under a URL.

Every node's folder has the same manifest and the files of its own ranks.  Every byte is compared with its hash on the
way, those that are there already too, which are not moved again; ``intake`` says how parts come in.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from nvme_resume import layout, logs
from nvme_resume.config import Options
from nvme_resume.errors import ConfigError, CorruptError, NoCheckpointError
from nvme_resume.manifest import Manifest, same_checkpoint
from nvme_resume.storage import catalog, commit, download, records, seal, transfer
from nvme_resume.storage import disk as seam
from nvme_resume.storage.intake import Intake
from nvme_resume.storage.remote import Remote

log = logs.logger


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


def look(source: Path | Remote, tag: str | None, damaged: list[CorruptError]) -> Part | None:
    """The part of ``tag`` (default: the newest step) in a save folder; None where it has none.

    What is damaged is none, and is added to ``damaged``.  Raises StorageError when a URL does not answer.
    """
    found: list[Part] = []
    names: Sequence[str | None] = (
        [tag] if tag is not None or isinstance(source, Remote) else catalog.tags(source)
    )
    for name in names:
        try:
            part = _part(source, name)
        except CorruptError as error:
            error.hint = "every node has the same manifest of a checkpoint: copy that of another"
            damaged.append(error)
            continue
        found += [] if part is None else [part]
    return max(found, key=lambda part: part.head.global_steps, default=None)


def _part(source: Path | Remote, tag: str | None) -> Part | None:
    if isinstance(source, Remote):
        there = download.look(source, tag)
        return None if there is None else Part(source, there.head, there.ranks)
    folder = source / str(tag)
    if not records.has_manifest(folder):
        return None
    head = records.read_manifest(folder)
    if head.tag != tag:
        raise CorruptError("it holds another tag", path=str(folder), expected=tag, found=head.tag)
    return Part(source, head, _ranks(folder, head))


def _ranks(folder: Path, head: Manifest) -> tuple[int, ...]:
    return tuple(r for r in range(head.world_size) if (folder / layout.rank_record(r)).is_file())


def _without_manifest(source: Path | Remote, head: Manifest) -> Part | None:
    """The part of a folder whose own manifest is damaged, where its records tell that it is this checkpoint."""
    if isinstance(source, Remote) or records.left_of(source / head.tag) != head.checkpoint_id:
        return None
    return Part(source, head, _ranks(source / head.tag, head))


def gather(
    sources: Sequence[Path | Remote], into: Path, tag: str | None, options: Options, *, show: bool
) -> Gathered:
    """Make ``into`` hold all ranks' files.  The caller owns ``into`` (``locks.take_save_folder``).

    Raises NoCheckpointError that names the ranks nobody has, ConfigError when the folders hold different checkpoints,
    CorruptError for a file that is not what was saved, NoSpaceError, StorageError, or OSError; then nothing new has
    appeared in ``into``, and what had come in part is gone on with the next time.
    """
    head, parts = _choose(sources, tag)
    target = into / head.tag
    there = look(into, head.tag, [])
    if there is not None and not same_checkpoint(there.head, head):
        raise _differs(
            there, head, "another checkpoint has that tag in the target", "gather into an empty folder"
        )
    if there is not None and not any(part.source == into for part in parts):
        parts.append(there)  # what is there already
    moved = _bring(parts, into, head, options, show=show)
    present = catalog.look(into, head.tag)
    if present.problem is not None:
        raise CorruptError(
            f"not complete after all parts came: {present.problem}",
            tag=head.tag,
            path=str(target),
            hint="gather into an empty folder",
        )
    moved += beside([part.source for part in parts], into, head.tag, options)
    return Gathered(target, head.tag, head.global_steps, head.world_size, moved)


def _choose(sources: Sequence[Path | Remote], tag: str | None) -> tuple[Manifest, list[Part]]:
    """Which checkpoint, and the parts there are of it."""
    if tag is not None and not layout.valid_tag(tag):
        raise ConfigError("not a usable tag", tag=tag, expected="one plain folder name")
    damaged: list[CorruptError] = []
    parts = [part for source in sources if (part := look(source, tag, damaged)) is not None]
    if not parts and damaged:
        raise damaged[0]
    if not parts:
        raise NoCheckpointError(
            "no checkpoint of nvme_resume in any of the folders", tag=tag, path=", ".join(map(_name, sources))
        )
    for problem in damaged:
        log.warning("damaged: %s", problem)
    head = max((p.head for p in parts), key=lambda h: h.global_steps)
    # The newest of one node may be older than that of another.
    found = [look(source, head.tag, []) or _without_manifest(source, head) for source in sources]
    parts = [part for part in found if part is not None]
    for part in parts:
        if not same_checkpoint(part.head, head):
            hint = "leave out the folder that belongs to another run, or name an older --tag"
            raise _differs(part, head, "the folders hold different checkpoints of that tag", hint)
    return head, parts


def _differs(part: Part, head: Manifest, message: str, hint: str) -> ConfigError:
    return ConfigError(
        message,
        tag=head.tag,
        path=str(part),
        expected=head.checkpoint_id,
        found=part.head.checkpoint_id,
        hint=hint,
    )


def _bring(parts: Sequence[Part], into: Path, head: Manifest, options: Options, *, show: bool) -> int:
    with Intake(into, head, "the folders that are gathered") as inbox:
        try:
            moved = _fill(inbox, parts, head, options, show=show)
        except (CorruptError, NoCheckpointError):
            inbox.discard()
            raise
        inbox.publish(latest=catalog.deserves_latest(into, head.global_steps))
    return moved


def _fill(inbox: Intake, parts: Sequence[Part], head: Manifest, options: Options, *, show: bool) -> int:
    missing = [rank for rank in range(head.world_size) if not inbox.is_good(rank, options, show=show)]
    _refuse_lost(missing, parts, head)
    moved = 0
    for rank in missing:
        # With hashes first: what has none cannot be told from what was damaged.  Then this machine's folders.
        holders = [part for part in parts if rank in part.ranks]
        holders.sort(key=lambda part: (not _sealed(part, rank), isinstance(part.source, Remote)))
        moved += _rank(rank, holders, inbox, options, show=show)
    return moved


def _sealed(part: Part, rank: int) -> bool:
    """Does it have the hashes of a rank's files?"""
    return isinstance(part.source, Remote) or (part.source / part.head.tag / layout.seal(rank)).is_file()


def _rank(rank: int, holders: Sequence[Part], inbox: Intake, options: Options, *, show: bool) -> int:
    """One rank's part, each file from the first that has a good one; bytes that came.  CorruptError when none has."""
    known: records.OfRank | None = None
    problems: list[CorruptError] = []
    moved = 0
    for part in holders:
        try:
            if isinstance(part.source, Remote):
                moved += download.bring(part.source, part.head, [rank], inbox, options)
            else:
                folder = part.source / part.head.tag
                if known is None:
                    known = records.read_rank(folder, part.head, rank)
                if known.seal is None:
                    known = seal.read_rank(folder, part.head, rank, options, show=show)
                needs = inbox.needs(rank, known, options)
                inbox.make_room(needs)
                moved += inbox.copy(rank, folder, needs, options, show=show)
                inbox.finish_rank(rank, known)
        except CorruptError as error:
            problems.append(error)
            continue
        if problems:
            log.warning("the part of rank %d came from %s instead; %s", rank, part, problems[0])
        return moved
    raise problems[0]


def _refuse_lost(missing: Sequence[int], parts: Sequence[Part], head: Manifest) -> None:
    """NoCheckpointError naming the ranks nobody has."""
    if nobody := [rank for rank in missing if not any(rank in part.ranks for part in parts)]:
        hosts = sorted({entry.host for entry in head.ranks if entry.rank in nobody})
        raise NoCheckpointError(
            f"nobody has the files of ranks {nobody}",
            tag=head.tag,
            path=", ".join(map(str, parts)),
            hint=f"bring the folder of {', '.join(hosts)}",
        )


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
