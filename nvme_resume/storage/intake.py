"""The parts of other ranks on their way into a checkpoint of a save folder, block by block, from wherever they come.

Where the folder holds the checkpoint already (every node's has the same manifest), they are added to it: a file gets
its name when all of it is there, durable and right; the rank's record comes last and says that all files are there.
Where it does not, a staging folder is filled and published like any save.  What was cut short is gone on with: of a
file that is there in part, everything before the first bad chunk stays.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from nvme_resume import layout
from nvme_resume.config import Options
from nvme_resume.errors import CorruptError, NoCheckpointError
from nvme_resume.manifest import FileSeal, Manifest, Record, same_checkpoint
from nvme_resume.storage import catalog, commit, records, room, transfer, verify
from nvme_resume.storage import disk as seam
from nvme_resume.storage.seal import HeldFolder

CHUNK_BYTES = verify.HASH_CHUNK_BYTES
_DIGITS = 32  # of a chunk's hash
_SLACK_BYTES = 16 << 20


class Need(NamedTuple):
    """One file that is not here yet; what lies before ``offset`` (whole chunks) is."""

    relative: str
    known: FileSeal
    offset: int


class Arrival:
    """One file on its way in: written under a temporary name, chunk by chunk, each compared with its hash."""

    def __init__(self, folder: Path, need: Need, said: str, tag: str, rank: int | None = None) -> None:
        """``said``: whoever sends it, in words."""
        self._path = folder / need.relative
        self.partial = layout.partial(self._path)
        self._need = need
        self._said, self._tag, self._rank = said, tag, rank
        seam.current().make_folder(self._path.parent)
        if need.offset == 0:
            seam.current().remove_tree(self.partial)
            seam.current().write_at(self.partial, 0, memoryview(b""))

    def put(self, offset: int, block: memoryview) -> None:
        """The chunk at ``offset``.  CorruptError when it is not what was saved; OSError."""
        at = offset // CHUNK_BYTES * _DIGITS
        expected = self._need.known.chunks[at : at + _DIGITS]
        found = xxhash.xxh3_128_hexdigest(block)
        if found != expected:
            raise CorruptError(
                f"what {self._said} sent is not what was saved",
                rank=self._rank,
                tag=self._tag,
                path=self._need.relative,
                offset=offset,
                expected=expected,
                found=found,
                hint=f"verify the checkpoint on {self._said}: nvme-resume verify --level full",
            )
        seam.current().write_at(self.partial, offset, block)

    def finish(self) -> None:
        """All chunks are there: make it durable, then give it its name (which the caller makes durable)."""
        disk = seam.current()
        disk.sync_file(self.partial)
        disk.rename(self.partial, self._path)


class Intake:
    """What one save folder takes in of one checkpoint.

    ``head``: its manifest, as the folder has it or as the sender told it.  By whoever owns the folder.  A context
    manager that lets go of the folder; what is there in part stays, for the next time.
    """

    def __init__(self, save_dir: Path, head: Manifest, said: str, *, new: bool = True) -> None:
        """``said``: the sender in words; ``new``: the checkpoint may be missing, and is made by ``publish`` then.

        Raises NoCheckpointError when another checkpoint has the tag; CorruptError (a damaged manifest, if not ``new``);
        OSError.
        """
        self._save_dir = save_dir
        self._head = head
        self._said = said
        self._new = new
        self._staging = layout.staging(head.tag, head.checkpoint_id)
        self._target = save_dir / head.tag
        self._held = self._hold()
        if self._held is not None:
            self.folder = self._held.path
        else:
            self.folder = save_dir / self._staging
            catalog.under_way.add(self.folder)
            seam.current().make_folder(self.folder / layout.RECORDS)

    def _hold(self) -> HeldFolder | None:
        """The checkpoint, which may be replaced or removed meanwhile.  None: it is to be made.

        Every node has the same manifest, so a damaged or missing one is written anew, where other records tell that
        it is this checkpoint.  Whatever else lies under the tag is somebody's, and stays.
        """
        if self._new and not os.path.lexists(self._target):
            return None
        if self._new and not self._target.is_dir():
            raise self._another("something that is no folder")
        with contextlib.ExitStack() as undo:
            held = undo.enter_context(HeldFolder(self._target))
            try:
                found = records.read_manifest(held.path)
            except CorruptError as error:
                if not self._new:
                    raise
                if all(path.is_dir() and not path.is_symlink() for path in held.path.rglob("*")):
                    return None
                if records.left_of(held.path) != self._head.checkpoint_id:
                    raise self._another(f"no record of it; {error.message}") from error
                records.write_late(held.path, layout.manifest(), self._head)
                found = records.read_manifest(held.path)
            if not same_checkpoint(found, self._head):
                raise self._another(found.checkpoint_id)
            undo.pop_all()
            return held

    def _another(self, found: str) -> NoCheckpointError:
        return NoCheckpointError(
            f"another checkpoint than that of {self._said} has this tag",
            tag=self._head.tag,
            path=str(self._target),
            expected=self._head.checkpoint_id,
            found=found,
            hint="remove the folder that belongs to another run",
        )

    def __enter__(self) -> Intake:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._held is not None:
            self._held.__exit__(kind, error, trace)
        catalog.under_way.discard(self._save_dir / self._staging)

    def lacks(self, rank: int) -> bool:
        """Is a rank's part not (all) here?  By records and sizes."""
        try:
            found = records.read_rank(self.folder, self._head, rank)
            verify.structure(self.folder, found.record.files, rank=rank, tag=self._head.tag)
        except CorruptError:
            return True
        return False

    def is_good(self, rank: int, options: Options, *, show: bool = False) -> bool:
        """Is a rank's part all here, to the last byte?  Not for sure without hashes."""
        tag = self._head.tag
        try:
            found = records.read_rank(self.folder, self._head, rank)
            if found.seal is None:
                return False
            verify.full(self.folder, found.seal.files, options, rank=rank, tag=tag, show=show)
        except CorruptError:
            return False
        return True

    def needs(self, rank: int, of_rank: records.OfRank, options: Options) -> list[Need]:
        """Which files of a rank are missing.  Reads and hashes what is there."""
        tag, seal = self._head.tag, of_rank.seal
        if seal is None:
            raise NoCheckpointError(f"{self._said} has no hashes of this part yet", rank=rank, tag=tag)
        records.check_rank(f"{self._said}/{tag}", self._head, rank, of_rank)
        for name, known in seal.files.items():
            verify.path_of(self.folder, name, rank=rank, tag=tag)
            if not _consistent(known):
                raise CorruptError(
                    "the hashes of a file contradict each other", rank=rank, tag=tag, path=name
                )
        return missing(self.folder, seal.files, options)

    def make_room(self, needs: list[Need]) -> None:
        """NoSpaceError when they do not fit."""
        wanted = room.Needs("this machine")
        nbytes = sum(n.known.size - n.offset for n in needs)
        wanted.add(self.folder, nbytes + _SLACK_BYTES, len(needs))
        room.refuse_too_little([wanted.plain()], f"the part that {self._said} sends", tag=self._head.tag)

    def arrival(self, rank: int, need: Need) -> Arrival:
        """Begin, or go on with, one file."""
        return Arrival(self.folder, need, self._said, self._head.tag, rank)

    def copy(
        self, rank: int, source: Path, needs: Sequence[Need], options: Options, *, show: bool = False
    ) -> int:
        """Files from a folder on this machine, by the native copier; bytes that came.

        CorruptError when one is not what was saved, after all that are good have come; NoSpaceError, StorageError.
        """
        tag, problems = self._head.tag, []
        coming: list[tuple[Need, transfer.Copy, Arrival]] = []
        for need in needs:
            try:
                path = verify.path_of(source, need.relative, rank=rank, tag=tag)
                verify.check_size(path, need.known.size, rank=rank, tag=tag)
            except CorruptError as error:
                problems.append(error)
                continue
            arrival = self.arrival(rank, need)
            size, at = need.known.size - need.offset, need.offset
            copy = transfer.Copy(path, arrival.partial, size, at, at, truncate=at == 0)
            coming.append((need, copy, arrival))
        found = transfer.run(
            [copy for _, copy, _ in coming], options, what=f"files of rank {rank}", sync=True, show=show
        )
        for (need, copy, arrival), seen in zip(coming, found, strict=True):
            chunks = need.known.chunks[: need.offset // CHUNK_BYTES * _DIGITS] + seen.chunks
            digest = transfer.digest_of_chunks(chunks)
            whole = FileSeal(size=need.offset + seen.size, digest=digest, chunks=chunks)
            try:
                verify.compare(copy.src, need.known, whole, rank=rank, tag=tag)
            except CorruptError as error:
                problems.append(error)
            else:
                arrival.finish()
        if problems:
            raise problems[0]
        return sum(copy.nbytes for _, copy, _ in coming)

    def finish_rank(self, rank: int, of_rank: records.OfRank) -> None:
        """All its files are here: their names become durable, then its records appear, the rank record last."""
        folders = {(self.folder / name).parent for name in of_rank.record.files}
        above = {p for f in folders for p in f.parents if p == self.folder or self.folder in p.parents}
        seam.current().make_folder(self.folder / layout.RECORDS)
        commit.sync_all([], sorted(folders | above | {self.folder}))
        late = {
            layout.extras(rank): of_rank.extras,
            layout.seal(rank): of_rank.seal,
            layout.rank_record(rank): of_rank.record,
        }
        for name, item in late.items():
            if item is not None and not self._holds(name, item):
                records.write_late(self.folder, name, item)

    def _holds(self, name: str, item: Record) -> bool:
        """Is that record here, and not a damaged one?"""
        try:
            return records.read(self.folder, name, type(item)) == item
        except CorruptError:
            return False

    def publish(self, *, latest: bool) -> None:
        """Where there was no such checkpoint: it appears, whole.  OSError."""
        if self._held is None:
            commit.publish(self._save_dir, self._staging, self._head, save_latest=latest)

    def discard(self) -> None:
        """Remove what was not published; what was there before stays."""
        if self._held is None:
            commit.discard(self._save_dir, self._staging, self._head.checkpoint_id)


def missing(folder: Path, files: Mapping[str, FileSeal], options: Options) -> list[Need]:
    """Which of ``files`` are not in ``folder`` with that content, and how much of each is there already."""
    there: list[tuple[str, FileSeal]] = []
    found: list[Need] = []
    partly: list[tuple[str, FileSeal, int]] = []
    for name, known in files.items():
        path = folder / name
        if _size(path) == known.size:
            there.append((name, known))
            continue
        whole_chunks = max(0, min(_size(layout.partial(path)), known.size)) // CHUNK_BYTES * CHUNK_BYTES
        if whole_chunks:
            partly.append((name, known, whole_chunks))
        else:
            found.append(Need(name, known, 0))
    hashed = transfer.run(
        [transfer.Copy(folder / name) for name, _ in there]
        + [transfer.Copy(layout.partial(folder / name), nbytes=size) for name, _, size in partly],
        options,
        what="look at what is there",
        sync=False,
    )
    for (name, known), seen in zip(there, hashed[: len(there)], strict=True):
        if seen.digest != known.digest:
            found.append(Need(name, known, 0))
    for (name, known, _), seen in zip(partly, hashed[len(there) :], strict=True):
        found.append(Need(name, known, _common(seen.chunks, known.chunks) * CHUNK_BYTES))
    order = list(files)
    return sorted(found, key=lambda need: order.index(need.relative))


def _consistent(known: FileSeal) -> bool:
    chunks = -(-known.size // CHUNK_BYTES)
    return len(known.chunks) == chunks * _DIGITS and transfer.digest_of_chunks(known.chunks) == known.digest


def _common(one: str, other: str) -> int:
    """How many chunk hashes agree from the start."""
    pairs = zip(_split(one), _split(other), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)) // _DIGITS)


def _split(chunks: str) -> Iterator[str]:
    return (chunks[i : i + _DIGITS] for i in range(0, len(chunks), _DIGITS))


def _size(path: Path) -> int:
    """-1 where there is no regular file."""
    with contextlib.suppress(OSError):
        return seam.current().size(path)
    return -1
