"""Bring a checkpoint, or the parts of some of its ranks, from a URL into a save folder; every byte is compared.

A checkpoint is there when its manifest is: that is uploaded last.  How the parts come in (block by block, resumable,
the rank record last) is ``intake``'s business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import aiofiles

from nvme_resume import integrity, layout, logs, manifest
from nvme_resume.config import Options
from nvme_resume.errors import ConfigError, CorruptError, NoCheckpointError, NvmeResumeError, StorageError
from nvme_resume.manifest import Extras, Manifest, RankRecord, Seal
from nvme_resume.storage import catalog, records
from nvme_resume.storage import disk as seam
from nvme_resume.storage.intake import CHUNK_BYTES, Intake, Need
from nvme_resume.storage.remote import Remote, each, in_thread

log = logs.logger


class Found(NamedTuple):
    """A checkpoint under a URL, and the ranks whose records are there."""

    head: Manifest
    ranks: tuple[int, ...]


def choose(remote: Remote, tag: str | None, damaged: Container[str] = ()) -> str:
    """The tag to load: ``tag``, else the one ``latest`` names, else the newest by step.  Not a ``damaged`` one.

    Raises NoCheckpointError naming the URL, ConfigError (no usable tag), CorruptError, StorageError.
    """
    return asyncio.run(_choose(remote, tag, damaged))


async def _choose(remote: Remote, tag: str | None, damaged: Container[str]) -> str:
    if tag is not None:
        if not layout.valid_tag(tag):
            raise ConfigError("not a usable tag", tag=tag, expected="one plain folder name")
        if await _manifest(remote.at(tag), tag) is None:
            there = [head.tag for head in await _heads(remote)]
            raise NoCheckpointError(
                "no such checkpoint (without its manifest it is not complete)",
                tag=tag,
                path=remote.path(tag),
                hint=f"complete ones there: {', '.join(there) or 'none'}",
            )
        return tag
    named = await remote.read(layout.LATEST, catalog.LONGEST_LATEST)
    first = None if named is None else named.decode("utf-8", "replace").strip()
    problem = f"no {layout.LATEST} file"
    if first is not None and layout.valid_tag(first) and first not in damaged:
        try:
            if await _manifest(remote.at(first), first) is not None:
                return first
            problem = f"{first} has no manifest"
        except NvmeResumeError as error:
            if isinstance(error, StorageError):
                raise
            problem = f"{first}: {error}"
    elif first is not None:
        problem = f"{first} is {'damaged' if first in damaged else 'no tag'}"
    heads = [head for head in await _heads(remote) if head.tag not in damaged]
    if not heads:
        raise NoCheckpointError(
            f"no complete checkpoint under this URL ({problem})",
            path=remote.url,
            hint="look at the URL; a checkpoint is there when <tag>/" + layout.manifest() + " is",
        )
    log.warning("%s: loading %s; %s", remote.url, heads[0].tag, problem)
    return heads[0].tag


def look(remote: Remote, tag: str | None) -> Found | None:
    """A checkpoint under the URL (default: the newest step); None where there is none.  CorruptError, StorageError."""

    async def ask() -> Found | None:
        head = (
            await _manifest(remote.at(tag), tag)
            if tag is not None
            else next(iter(await _heads(remote)), None)
        )
        if head is None:
            return None
        names = set(await remote.at(head.tag).names(layout.RECORDS))
        ranks = [r for r in range(head.world_size) if Path(layout.rank_record(r)).name in names]
        return Found(head, tuple(ranks))

    return asyncio.run(ask())


async def _heads(remote: Remote) -> list[Manifest]:
    """The manifests under the URL, newest step first; damaged ones are skipped."""

    async def one(name: str) -> Manifest | None:
        try:
            return await _manifest(remote.at(name), name)
        except CorruptError as error:
            log.warning("skipped: %s", error)
            return None

    names = [n for n in await remote.names() if layout.valid_tag(n) and n != layout.LATEST]
    found = [head for head in await each(names, one) if head is not None]
    return sorted(found, key=lambda head: head.global_steps, reverse=True)


async def _manifest(folder: Remote, tag: str) -> Manifest | None:
    path = folder.path(layout.manifest())
    data = await folder.read(layout.manifest(), manifest.MAX_RECORD_BYTES)
    if data is None:
        return None
    head = manifest.decode(Manifest, data, path)
    integrity.check_manifest(head, path)
    if head.tag != tag:
        raise CorruptError("this folder holds another tag", path=path, expected=tag, found=head.tag)
    return head


def head_of(remote: Remote, tag: str) -> Manifest:
    """The manifest of a tag.  NoCheckpointError without it."""
    head = asyncio.run(_manifest(remote.at(tag), tag))
    if head is None:
        raise NoCheckpointError("the checkpoint is gone", tag=tag, path=remote.path(tag))
    return head


def fetch(remote: Remote, head: Manifest, ranks: Sequence[int], into: Path, options: Options) -> int:
    """Bring the parts of ``ranks`` into the save folder ``into``, which the caller owns; bytes that came.

    Raises CorruptError (what is there is not what was saved), NoCheckpointError, NoSpaceError, StorageError, OSError;
    what had arrived stays for the next time.
    """
    with Intake(into, head, remote.url) as inbox:
        nbytes = bring(remote, head, ranks, inbox, options)
        inbox.publish(latest=False)
    return nbytes


def bring(remote: Remote, head: Manifest, ranks: Sequence[int], inbox: Intake, options: Options) -> int:
    """The same into a folder that takes in more than this; the caller publishes it."""
    return asyncio.run(_fetch(remote.at(head.tag), head, ranks, inbox, options))


def beside(remote: Remote, tag: str, into: Path) -> int:
    """Bring what a Trainer put beside the tag folder and ``into`` lacks; bytes.

    Nothing has hashes of these: only their sizes are compared.  Raises StorageError, OSError.
    """
    return asyncio.run(_beside(remote, tag, into))


async def _beside(remote: Remote, tag: str, into: Path) -> int:
    if await remote.size(layout.TRAINER_STATE) is None:
        return 0
    names = await remote.find()
    tags = {tag, *(n.split("/")[0] for n in names if n.split("/")[1:2] == [layout.RECORDS])}
    missing = [n for n in catalog.beside_of(names, tags) if not (into / n).exists()]
    return sum(await each(missing, lambda name: _loose(remote, name, into)))


async def _loose(remote: Remote, name: str, into: Path) -> int:
    disk = seam.current()
    path, size = layout.inside(into, name), await remote.size(name)
    if path is None or size is None:
        raise StorageError("it was there, and is gone", path=remote.path(name), hint="try again")
    temporary = layout.partial(path)
    disk.make_folder(path.parent)
    try:
        async with aiofiles.open(temporary, "wb") as file:

            async def take(_: int, block: bytes) -> None:
                await file.write(block)

            await remote.each_block(name, 0, take)
        came = disk.size(temporary)
        if came == size:
            await in_thread(lambda: disk.sync_file(temporary))
            disk.rename(temporary, path)
    finally:
        disk.remove_tree(temporary)
    if came != size:
        raise StorageError(
            "what came has another size than what is there",
            path=remote.path(name),
            expected=f"{size} bytes",
            found=f"{came} bytes",
            hint="try again",
        )
    disk.sync_folder(path.parent)
    return size


async def _fetch(
    folder: Remote, head: Manifest, ranks: Sequence[int], inbox: Intake, options: Options
) -> int:
    parts = await each(ranks, lambda rank: _records(folder, head, rank))
    needs: list[tuple[int, Need]] = []
    for rank, of_rank in zip(ranks, parts, strict=True):
        found = await in_thread(partial(inbox.needs, rank, of_rank, options))
        needs += [(rank, need) for need in found]
    inbox.make_room([need for _, need in needs])
    sizes = await each(needs, lambda item: _file(folder, item[0], item[1], inbox, head.tag))
    for rank, of_rank in zip(ranks, parts, strict=True):
        await in_thread(partial(inbox.finish_rank, rank, of_rank))
    return sum(sizes)


async def _records(folder: Remote, head: Manifest, rank: int) -> records.OfRank:
    return records.OfRank(
        await _record(folder, layout.rank_record(rank), RankRecord, rank, head.tag),
        await _record(folder, layout.seal(rank), Seal, rank, head.tag),
        await _record(folder, layout.extras(rank), Extras, rank, head.tag),
    )


async def _record(folder: Remote, relative: str, kind: type[manifest.R], rank: int, tag: str) -> manifest.R:
    data = await folder.read(relative, manifest.MAX_RECORD_BYTES)
    if data is None:
        raise CorruptError(
            "a record is missing under the URL", rank=rank, tag=tag, path=folder.path(relative), hint=_HINT
        )
    return manifest.decode(kind, data, folder.path(relative))


async def _file(folder: Remote, rank: int, need: Need, inbox: Intake, tag: str) -> int:
    arrival = await in_thread(lambda: inbox.arrival(rank, need))
    end = need.offset

    async def take(offset: int, block: bytes) -> None:
        nonlocal end
        end = offset + len(block)
        if end > need.known.size:
            raise _wrong_size(folder, need, rank, tag, f"more than {need.known.size} bytes")

        def put() -> None:
            view = memoryview(block)
            for at in range(0, len(view), CHUNK_BYTES):
                arrival.put(offset + at, view[at : at + CHUNK_BYTES])

        try:
            await in_thread(put)
        except CorruptError as error:
            error.path, error.hint = folder.path(need.relative), _HINT
            raise

    size = await folder.size(need.relative)
    if size != need.known.size:
        raise _wrong_size(folder, need, rank, tag, "nothing" if size is None else f"{size} bytes")
    await folder.each_block(need.relative, need.offset, take)
    if end != need.known.size:
        raise _wrong_size(folder, need, rank, tag, f"{end} bytes")
    await in_thread(arrival.finish)
    return need.known.size - need.offset


def _wrong_size(folder: Remote, need: Need, rank: int, tag: str, found: str) -> CorruptError:
    return CorruptError(
        "the object under the URL is not the file that was saved",
        rank=rank,
        tag=tag,
        path=folder.path(need.relative),
        expected=f"{need.known.size} bytes",
        found=found,
        hint=_HINT,
    )


_HINT = "load an older tag of the same URL by its name"
