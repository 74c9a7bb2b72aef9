"""The hashes of one rank's files, taken before the commit or, for linked files, behind the training's back.

A background seal must not trust names: the folder may be renamed (Hugging Face publishes ``checkpoint-N`` that way) or
deleted meanwhile, so it is held open and its files are reached through the descriptor.  And it must not trust that
nobody wrote: inode, size and time of every linked file were recorded at the commit and are compared afterwards.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from nvme_resume import layout, logs, manifest
from nvme_resume.config import Options
from nvme_resume.errors import CorruptError, NvmeResumeError
from nvme_resume.manifest import FileSeal, Manifest, RankRecord, Seal
from nvme_resume.storage import records, transfer, verify
from nvme_resume.storage.background import Gate

log = logs.logger

_DELETION_SECONDS = 5.0


class HeldFolder:
    """A folder by descriptor: stays the same one when it is renamed, and says when it is gone."""

    def __init__(self, folder: Path) -> None:
        self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self.path = Path(f"/proc/self/fd/{self._descriptor}")

    def is_checkpoint(self) -> bool:
        """Is the manifest still there?"""
        return (self.path / layout.manifest()).exists()

    def close(self) -> None:
        """Let go of it."""
        os.close(self._descriptor)

    def __enter__(self) -> HeldFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Errors name the folder, not the descriptor it is held by."""
        if isinstance(error, NvmeResumeError | OSError):
            self.say_where(error)
        self.close()

    def say_where(self, error: NvmeResumeError | OSError) -> None:
        """Name the folder in an error."""
        held, folder = str(self.path), str(self.path.resolve())
        if isinstance(error, OSError):
            if isinstance(error.filename, str):
                error.filename = error.filename.replace(held, folder, 1)
        elif error.path is not None:
            error.path = error.path.replace(held, folder, 1)


def take(
    folder: Path,
    record: RankRecord,
    options: Options,
    *,
    known: Mapping[str, FileSeal] | None = None,
    gate: Gate | None = None,
    show: bool = False,
    committed: bool = False,
) -> Seal:
    """Hash the files that ``known`` does not have and put the seal together.

    Raises CorruptError when a file is not what the record says, or was written to since the commit.
    """
    files = dict(known or {})
    missing = [name for name in record.files if name not in files]
    where = {"rank": record.rank, "tag": record.tag}
    paths = [verify.path_of(folder, name, rank=record.rank, tag=record.tag) for name in missing]
    copies = [transfer.Copy(path) for path in paths]
    found = transfer.run(
        copies, options, what=f"seal {record.tag}", sync=False, gate=gate, show=show, live=not committed
    )
    for name, path, seal in zip(missing, paths, found, strict=True):
        listed = record.files[name]
        verify.check_untouched(path, listed, rank=record.rank, tag=record.tag)
        if listed.digest not in (None, seal.digest) or listed.size != seal.size:
            raise CorruptError(
                "the file changed after the commit",
                path=name,
                expected=f"{listed.size} bytes, {listed.digest}",
                found=f"{seal.size} bytes, {seal.digest}",
                **where,  # type: ignore[arg-type]
            )
        files[name] = seal
    return Seal(
        checkpoint_id=record.checkpoint_id,
        rank=record.rank,
        record_digest=manifest.digest_of(record),
        files=files,
    )


def read_rank(
    folder: Path, head: Manifest, rank: int, options: Options, *, show: bool = False
) -> records.OfRank:
    """The records of one rank, its files being there; the hashes are taken now where nobody has taken them yet.

    Raises CorruptError.
    """
    of_rank = records.read_rank(folder, head, rank)
    verify.structure(folder, of_rank.record.files, rank=rank, tag=head.tag)
    if of_rank.seal is not None:
        return of_rank
    verify.untouched(folder, of_rank.record.files, rank=rank, tag=head.tag)
    return of_rank._replace(seal=take(folder, of_rank.record, options, show=show, committed=True))


def add_if_possible(folder: HeldFolder, record: RankRecord, options: Options, gate: Gate) -> None:
    """``add`` for a checkpoint that somebody else saved: where we may not write, it stays without."""
    path = folder.path.resolve()
    try:
        add(folder, record, options, gate, {})
    except OSError as error:
        log.warning("the hashes of %s could not be added: %s", path, error.strerror or error)


def add(
    folder: HeldFolder, record: RankRecord, options: Options, gate: Gate, known: Mapping[str, FileSeal]
) -> None:
    """Seal a committed checkpoint; closes ``folder``.  Silent when the checkpoint was deleted meanwhile."""
    try:
        seal = take(folder.path, record, options, known=known, gate=gate, committed=True)
        records.write_late(folder.path, layout.seal(record.rank), seal)
    except (NvmeResumeError, OSError) as error:
        folder.say_where(error)
        # Is somebody removing the folder, file by file?  Then the manifest goes, too, in a moment.
        deadline = time.monotonic() + _DELETION_SECONDS
        while folder.is_checkpoint():
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    finally:
        folder.close()
