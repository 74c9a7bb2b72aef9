"""Put a committed checkpoint under a URL, each place the parts of its ranks; the manifest comes last.

Order, and why: (1) files that others put beside the tag folder; (2) the files of each rank, each compared with its hash
while it is read, then read back and compared again; (3) extras and seal; (4) the rank record, which says that
everything of that rank is there and was compared; (5) when the records of all ranks are there, the manifest: only now
there is a checkpoint; (6) ``latest``.  What a cut upload has left is compared and not moved again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from nvme_resume import layout, logs, manifest
from nvme_resume.errors import (
    CorruptError,
    IncompatibleError,
    NoCheckpointError,
    ReplacedError,
    StorageError,
)
from nvme_resume.manifest import FileSeal, Manifest, RankRecord, Record
from nvme_resume.storage import catalog, records, verify
from nvme_resume.storage.remote import Remote, each, hash_file, in_thread

log = logs.logger

_SEAL_POLL_SECONDS = 0.05
_POLL_SECONDS = 1.0  # of the URL, for the parts of other nodes: each time costs a request


@dataclass(frozen=True)
class Part:
    """What one process uploads of one checkpoint.

    ``beside``: files beside the tag folder, relative to the save folder.  ``publishes``: the process that writes the
    manifest.
    """

    save_dir: Path
    tag: str
    checkpoint_id: str  # of this save: a tag may be saved again meanwhile
    ranks: tuple[int, ...]
    publishes: bool
    latest: bool
    beside: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """The checkpoint."""
        return self.save_dir / self.tag


class Moved(NamedTuple):
    """What went over the network; nothing when all was there."""

    nbytes: int = 0
    files: int = 0


def upload(part: Part, to: Remote, seconds: float) -> Moved:
    """Upload ``part`` to ``to``, the URL that stands for its save folder.  From a thread of its own.

    ``seconds``: how long to wait for hashes, and for the parts of other nodes.  Raises CorruptError (a local file is
    not what was saved), StorageError naming the URL, NoCheckpointError (it was removed meanwhile), OSError.
    """
    return asyncio.run(_Upload(part, to, seconds).run())


class _Unreadable:
    """Stands for a record that is damaged, or a newer version's: it is written anew."""


def _is(there: object, head: Manifest) -> bool:
    return isinstance(there, Manifest) and manifest.same_checkpoint(there, head)


class _Upload:
    def __init__(self, part: Part, to: Remote, seconds: float) -> None:
        self._part = part
        self._to = to
        self._into = to.at(part.tag)
        self._deadline = time.monotonic() + seconds
        self._seconds = seconds
        self._moved: list[int] = []

    async def run(self) -> Moved:
        part = self._part
        head = await in_thread(lambda: records.read_manifest(part.folder))
        if head.checkpoint_id != part.checkpoint_id:
            raise ReplacedError("the tag was saved again meanwhile", tag=part.tag, path=str(part.folder))
        await self._forget_another(head)
        for rank in part.ranks:
            await self._rank(head, rank)
        if part.publishes:
            await self._publish(head)
        return Moved(sum(self._moved), len(self._moved))

    async def _forget_another(self, head: Manifest) -> None:
        """A checkpoint that had the tag before is none from now on: its objects are replaced one by one."""
        there = await self._there(layout.manifest(), Manifest)
        if there is not None and not _is(there, head):
            await self._into.remove(layout.manifest())

    async def _rank(self, head: Manifest, rank: int) -> None:
        folder, name = self._part.folder, layout.rank_record(rank)
        if await self._holds_record(head, rank):
            return
        await self._wait(lambda: (folder / layout.seal(rank)).exists(), folder, rank)
        found = await in_thread(lambda: records.read_rank(folder, head, rank))
        record, seal, extras = found
        if seal is None:
            raise CorruptError(
                "the hashes are gone", rank=rank, tag=head.tag, path=str(folder / layout.seal(rank))
            )
        await self._into.remove(name)  # one of another save of this tag: from now on the part is not whole
        if rank == self._part.ranks[0]:
            await self._beside()
        await each(seal.files.items(), lambda item: self._file(item[0], item[1], rank))
        small: Mapping[str, Record] = {layout.extras(rank): extras, layout.seal(rank): seal}
        for relative, item in small.items():
            await self._into.write(relative, manifest.encode(item))
        await self._into.write(name, manifest.encode(record))

    async def _holds_record(self, head: Manifest, rank: int) -> bool:
        """Is a rank's record there, and so all the rest of its part?"""
        record = await self._there(layout.rank_record(rank), RankRecord)
        return isinstance(record, RankRecord) and manifest.digest_of(record) == head.ranks[rank].record

    async def _there(self, name: str, kind: type[manifest.R]) -> manifest.R | _Unreadable | None:
        """A record as it is under the URL."""
        try:
            data = await self._into.read(name, manifest.MAX_RECORD_BYTES)
            return None if data is None else manifest.decode(kind, data, self._into.path(name))
        except (CorruptError, IncompatibleError):
            return _Unreadable()

    async def _file(self, relative: str, known: FileSeal, rank: int) -> None:
        tag = self._part.tag
        source = verify.path_of(self._part.folder, relative, rank=rank, tag=tag)
        await self._put(self._into, relative, source, known, rank)

    async def _put(
        self, into: Remote, relative: str, source: Path, known: FileSeal, rank: int | None
    ) -> None:
        """Unless it is there: put it there, then compare what comes back; once more when that is wrong."""
        found = await self._found(into, relative, known)
        for _ in range(0 if found == known else 2):
            await into.put(relative, source, known, rank=rank, tag=self._part.tag)
            self._moved.append(known.size)
            found = await self._found(into, relative, known)
            if found == known:
                break
        if found != known:
            raise StorageError(
                "what comes back from the URL is not what was sent there, twice",
                rank=rank,
                tag=self._part.tag,
                path=into.path(relative),
                expected=f"{known.size} bytes, {known.digest}",
                found="nothing" if found is None else f"{found.size} bytes, {found.digest}",
                hint="look at the storage and the network; the next save tries again",
            )

    async def _found(self, into: Remote, relative: str, known: FileSeal) -> FileSeal | None:
        """Size and hashes of what is there; where the size is wrong already nothing is read."""
        size = await into.size(relative)
        if size is None or size != known.size:
            return None if size is None else FileSeal(size=size, digest="0" * 32, chunks="")
        return await into.hash(relative)

    async def _beside(self) -> None:
        """Files beside the tag folder.  Nothing has their hashes: what is read first counts."""

        async def one(relative: str) -> None:
            source = self._part.save_dir / relative
            await self._put(self._to, relative, source, await hash_file(source), None)

        await each(self._part.beside, one)

    async def _publish(self, head: Manifest) -> None:
        """The manifest, when every rank's part is there; then ``latest``."""
        missing = [entry.rank for entry in head.ranks if entry.rank not in self._part.ranks]
        while missing:
            names = set(await self._into.names(layout.RECORDS))
            candidates = [r for r in missing if Path(layout.rank_record(r)).name in names]
            there = await each(candidates, lambda rank: self._holds_record(head, rank))
            arrived = {r for r, yes in zip(candidates, there, strict=True) if yes}
            missing = [r for r in missing if r not in arrived]
            if missing:
                if await in_thread(lambda: records.read_manifest(self._part.folder)) != head:
                    raise NoCheckpointError("the checkpoint was replaced", tag=head.tag)
                await self._pause(_POLL_SECONDS, partial(self._others_late, head, missing))
        if not _is(await self._there(layout.manifest(), Manifest), head):
            await self._into.write(layout.manifest(), manifest.encode(head))
        if (
            self._part.latest
            and await self._to.read(layout.LATEST, catalog.LONGEST_LATEST) != head.tag.encode()
        ):
            await self._to.write(layout.LATEST, head.tag.encode())

    def _others_late(self, head: Manifest, missing: list[int]) -> StorageError:
        hosts = sorted({entry.host for entry in head.ranks if entry.rank in missing})
        return StorageError(
            f"ranks {missing} did not upload their part within {self._seconds:.0f} s",
            tag=head.tag,
            path=self._into.url,
            hint=f"look at the logs of {', '.join(hosts)}; without them there is no checkpoint under the URL",
        )

    async def _wait(self, over: Callable[[], bool], folder: Path, rank: int) -> None:
        """For the hashes of a rank, which its own process takes in the background."""
        while not over():
            if not (folder / layout.manifest()).exists():
                raise NoCheckpointError("the checkpoint is gone", tag=self._part.tag, path=str(folder))
            await self._pause(
                _SEAL_POLL_SECONDS,
                lambda: StorageError(
                    f"rank {rank} did not write its hashes within {self._seconds:.0f} s",
                    rank=rank,
                    tag=self._part.tag,
                    path=str(folder / layout.seal(rank)),
                    hint='look at its log; "seal": "before_commit" writes them while training waits',
                ),
            )

    async def _pause(self, seconds: float, too_late: Callable[[], StorageError]) -> None:
        if time.monotonic() > self._deadline:
            raise too_late()
        await asyncio.sleep(seconds)
        await in_thread(self._to.breathe)


def beside(save_dir: Path, tag: str, *, everything: bool) -> tuple[str, ...]:
    """Files beside the tag folder that go along: of the place that publishes all, of others those of single ranks.

    A Trainer writes the same model files on every node that saves, and random states that only one node has.
    """
    names = catalog.beside(save_dir, tag)
    return tuple(n for n in names if everything or Path(n).name.startswith("rng_state_"))
