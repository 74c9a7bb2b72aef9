"""Read and write the records of one checkpoint folder."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path
from typing import NamedTuple, TypeVar

from nvme_resume import integrity, layout, manifest
from nvme_resume.errors import CorruptError, NoCheckpointError, NvmeResumeError
from nvme_resume.manifest import Extras, Manifest, RankRecord, Record, Seal
from nvme_resume.storage import disk as seam

R = TypeVar("R", bound=Record)


class OfRank(NamedTuple):
    """The records of one rank; no seal where none was written yet."""

    record: RankRecord
    seal: Seal | None
    extras: Extras


def write(folder: Path, relative: str, record: Record) -> None:
    """Create the record file ``folder/relative``; the caller syncs it."""
    path = folder / relative
    seam.current().make_folder(path.parent)
    seam.current().write(path, manifest.encode(record), sync=False)


def write_late(folder: Path, relative: str, record: Record, *, sync_name: bool = True) -> None:
    """Add a record to a checkpoint: it appears whole or not at all, and is durable on return.

    ``sync_name=False`` leaves the fsync of its name to whoever waits for the record to appear: one that failed here
    would be repeated by them, and the second one says "fine".
    """
    disk = seam.current()
    path = folder / relative
    # Two runs may have loaded the same checkpoint and add the same seal.
    prefix = f"{layout.STAGING_PREFIX}{path.name}."
    temporary = path.with_name(f"{prefix}{uuid.uuid4().hex[:12]}")
    try:
        disk.write(temporary, manifest.encode(record))
        disk.rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            disk.remove_tree(temporary)
        if not path.exists():
            raise
        return  # the other run was faster, and has removed ours
    if sync_name:
        disk.sync_folder(path.parent)
    with contextlib.suppress(OSError):
        # What a run that died left.  One that lives does not need its file any more.
        for name in disk.names(path.parent):
            if name.startswith(prefix):
                disk.remove_tree(path.with_name(name))


def read(folder: Path, relative: str, kind: type[R]) -> R:
    """Read and check one record.  CorruptError when it is missing, unreadable or not what it claims."""
    path = folder / relative
    if path.parent.is_symlink():  # the last part is looked at when it is opened
        raise CorruptError(
            f"the folder of {path.name} is a symbolic link", path=str(path.parent), hint="load an older tag"
        )
    try:
        data = seam.current().read(path, manifest.MAX_RECORD_BYTES)
    except OSError as error:
        raise CorruptError(
            f"record cannot be read: {error.strerror or error}", path=str(path), hint="load an older tag"
        ) from error
    return manifest.decode(kind, data, str(path))


def has_manifest(folder: Path) -> bool:
    """True when nvme_resume committed this folder (whatever stands under the name is checked when it is read).

    Raises CorruptError where rank records stand without a manifest: only extras may, beside plain DeepSpeed's files.
    """
    if os.path.lexists(folder / layout.manifest()):
        return True
    orphans = sorted(
        p for p in (folder / layout.RECORDS).glob("rank*.json") if not p.name.endswith(".extras.json")
    )
    if orphans:
        raise CorruptError(
            "the manifest is missing",
            tag=folder.name,
            path=str(folder / layout.manifest()),
            expected=f"a manifest beside {orphans[0].name}",
            found="none",
            hint="load an older tag of the same folder by its name",
        )
    return False


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder (a folder that is being committed has another name than its tag)."""
    if not folder.is_dir():
        raise NoCheckpointError("no such checkpoint folder", path=str(folder), hint="look at the tags in it")
    head = read(folder, layout.manifest(), Manifest)
    integrity.check_manifest(head, str(folder / layout.manifest()))
    return head


def left_of(folder: Path) -> str | None:
    """The id of the checkpoint that a folder without a readable manifest is left of.

    None where no record is readable, or they contradict each other: then it may be anybody's.
    """
    ids: set[str] = set()
    for path in sorted((folder / layout.RECORDS).glob("rank*.json")):
        name = f"{layout.RECORDS}/{path.name}"
        with contextlib.suppress(NvmeResumeError):
            if path.name.endswith(".seal.json"):
                ids.add(read(folder, name, Seal).checkpoint_id)
            elif path.name.endswith(".extras.json"):
                ids.add(read(folder, name, Extras).checkpoint_id)
            else:
                ids.add(read(folder, name, RankRecord).checkpoint_id)
    return ids.pop() if len(ids) == 1 else None


def read_rank(folder: Path, head: Manifest, rank: int) -> OfRank:
    """The records of one rank, checked against the manifest and each other; no seal where none was written yet."""
    if not 0 <= rank < len(head.ranks):
        raise CorruptError(
            "the manifest does not list this rank", rank=rank, path=str(folder / layout.manifest())
        )
    record = read(folder, layout.rank_record(rank), RankRecord)
    extras = read(folder, layout.extras(rank), Extras)
    seal = None
    if head.sealed or os.path.lexists(folder / layout.seal(rank)):
        seal = read(folder, layout.seal(rank), Seal)
    found = OfRank(record, seal, extras)
    check_rank(folder, head, rank, found)
    return found


def check_rank(folder: Path | str, head: Manifest, rank: int, of_rank: OfRank) -> None:
    """CorruptError unless these are the records that the manifest means; ``folder`` (or URL): where they came from."""
    entry = head.ranks[rank]
    record, seal, extras = of_rank
    sealed = [] if seal is None else [(layout.seal(rank), seal)]
    for relative, expected, found in (
        (layout.rank_record(rank), entry.record, manifest.digest_of(record)),
        (layout.extras(rank), entry.extras, manifest.digest_of(extras)),
        *((name, entry.record, item.record_digest) for name, item in sealed),
    ):
        if expected != found:
            raise CorruptError(
                "record belongs to another checkpoint",
                rank=rank,
                tag=head.tag,
                path=f"{folder}/{relative}",
                expected=expected,
                found=found,
                hint="load an older tag of the same folder by its name",
            )
    everything: list[tuple[str, RankRecord | Extras | Seal]] = [
        (layout.rank_record(rank), record),
        (layout.extras(rank), extras),
        *sealed,
    ]
    for relative, item in everything:
        if (item.checkpoint_id, item.rank) != (head.checkpoint_id, rank):
            raise CorruptError(
                "record belongs to another rank or checkpoint",
                rank=rank,
                tag=head.tag,
                path=f"{folder}/{relative}",
                expected=f"rank {rank} of {head.checkpoint_id}",
                found=f"rank {item.rank} of {item.checkpoint_id}",
            )
    if (record.tag, record.world_size) != (head.tag, head.world_size):
        raise CorruptError(
            "record and manifest disagree on tag or world size",
            rank=rank,
            tag=head.tag,
            path=f"{folder}/{layout.rank_record(rank)}",
            expected=f"{head.tag} of {head.world_size} ranks",
            found=f"{record.tag} of {record.world_size} ranks",
        )
    integrity.check(record, seal, extras, f"{folder}/{layout.rank_record(rank)}")
