"""One node brings another what that lacks of a checkpoint: the two sides of the talk.

The sender offers (manifest, records and hashes of its ranks; names, sizes and hashes of loose files beside the tag
folder), the receiver asks for ranges of files until it has all, then says how it went.  Every 4 MiB block is compared
with its hash when it comes, so a wrong one is noticed at once, and a transfer that was cut goes on where it ended.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nvme_resume import errors, layout, manifest
from nvme_resume.config import Options
from nvme_resume.errors import (
    CorruptError,
    NoCheckpointError,
    NvmeResumeError,
    PeerError,
    ReplacedError,
    StorageError,
)
from nvme_resume.manifest import Extras, FileSeal, Manifest, RankRecord, Seal
from nvme_resume.nodes.channel import Channel
from nvme_resume.nodes.messages import Ask, Hello, M, Message, Offer, Sent, Told
from nvme_resume.storage import catalog, commit, intake, records, transfer, verify
from nvme_resume.storage.background import Cancelled, Gate
from nvme_resume.storage.intake import CHUNK_BYTES, Need
from nvme_resume.storage.limit import Limit
from nvme_resume.storage.seal import HeldFolder, read_rank

_POLL_SECONDS = 0.05
_WINDOW_BYTES = 16 * CHUNK_BYTES  # what is asked for at once
Progress = Callable[[int], None]
_loose_mutex = threading.Lock()  # several nodes may bring the same files beside a tag folder


@dataclass(frozen=True)
class Errand:
    """What is to be brought: the parts of ``ranks`` of one checkpoint, and the files beside its folder."""

    save_dir: Path
    tag: str
    checkpoint_id: str  # of this save: a tag may be saved again meanwhile
    ranks: tuple[int, ...]
    loose: bool = False  # a Trainer's files beside the tag folder, too
    new: bool = False  # it may be missing here altogether; whoever fetches publishes it
    live: bool = False  # saved by this run
    sealing: bool = False  # just saved: its ranks are writing their hashes
    doubted: bool = False  # what is here of these parts may be damaged, whatever the sizes say

    @property
    def folder(self) -> Path:
        """The checkpoint."""
        return self.save_dir / self.tag

    @property
    def replaced(self) -> bool:
        """Has another save taken the tag?"""
        return self.folder.is_dir() and not catalog.is_still(self.folder, self.checkpoint_id)


class Brought(NamedTuple):
    """Bytes that were moved, in how many files, and the manifest of the checkpoint."""

    nbytes: int
    files: int
    head: Manifest | None = None


# ---- the sender ----


def serve(channel: Channel, errand: Errand, limit: Limit, gate: Gate, options: Options) -> Brought:
    """Offer what this node has, send what is asked for; what went.

    Raises what went wrong on either side: then the other side knows, unless it is a PeerError.
    """
    with _both_know(channel, errand), contextlib.ExitStack() as undo:
        hello = _hear(channel, Hello)
        if hello.skip:
            return Brought(0, 0)
        if errand.sealing:
            _await_seals(errand, gate, options.timeout_seconds)
        folder = undo.enter_context(HeldFolder(errand.folder))  # it may be renamed or removed meanwhile
        offer, paths = _offer(folder.path, errand, hello.loose, options)
        channel.send(offer)
        return _answer(channel, paths, limit, gate)


def _await_seals(errand: Errand, gate: Gate, seconds: float) -> None:
    """Until the hashes of this node's ranks are written, each by its own rank, in the background."""
    folder, deadline = errand.folder, time.monotonic() + seconds
    while missing := [r for r in errand.ranks if not (folder / layout.seal(r)).exists()]:
        gate.check()
        if not (folder / layout.manifest()).exists():
            raise NoCheckpointError("the checkpoint is gone", tag=errand.tag, path=str(folder))
        if time.monotonic() > deadline:
            raise StorageError(
                f"ranks {missing} did not write their hashes within {seconds:.0f} s",
                tag=errand.tag,
                path=str(folder),
                hint='look at their logs; "seal": "before_commit" writes them while training waits',
            )
        time.sleep(_POLL_SECONDS)


def _offer(
    folder: Path, errand: Errand, not_loose: list[str] | None, options: Options
) -> tuple[Offer, dict[str, Path]]:
    head = records.read_manifest(folder)
    if head.checkpoint_id != errand.checkpoint_id:
        raise _another(errand, "here", head)
    ranks: dict[int, tuple[str | None, str | None, str | None]] = {}
    paths: dict[str, Path] = {}
    for rank in errand.ranks:
        of_rank = read_rank(folder, head, rank, options)
        ranks[rank] = (_text(of_rank.record), _text(of_rank.seal), _text(of_rank.extras))
        names = of_rank.record.files
        paths |= {name: verify.path_of(folder, name, rank=rank, tag=head.tag) for name in names}
    loose = {} if not_loose is None else _loose(errand.save_dir, head.tag, set(not_loose), options)
    paths |= {f"../{name}": errand.save_dir / name for name in loose}
    return Offer(head=manifest.encode(head).decode(), ranks=ranks, loose=loose), paths


def _text(record: manifest.Record | None) -> str | None:
    return None if record is None else manifest.encode(record).decode()


def _loose(save_dir: Path, tag: str, there: set[str], options: Options) -> dict[str, FileSeal]:
    """Files that others than DeepSpeed put beside the tag folder and the other side lacks, with their hashes."""
    names = [name for name in catalog.beside(save_dir, tag) if name not in there]
    seals = transfer.run([transfer.Copy(save_dir / n) for n in names], options, what="hash", sync=False)
    return dict(zip(names, seals, strict=True))


def _answer(channel: Channel, paths: Mapping[str, Path], limit: Limit, gate: Gate) -> Brought:
    """Until the other side has all it wants."""
    buffers = [torch.empty(CHUNK_BYTES, dtype=torch.uint8) for _ in range(2)]
    total = 0
    seen: set[str] = set()
    while True:
        asked = _hear(channel, Ask)
        if asked.done:
            return Brought(total, len(seen))
        if asked.file not in paths or asked.length > _WINDOW_BYTES:
            raise PeerError(
                f"{channel.there} asks for what was not offered",
                rank=channel.there.rank,
                found=f"{asked.length} bytes of {asked.file[:200]!r}",
            )
        path = paths[asked.file]
        seen.add(asked.file)
        under_way, problem = None, None
        for turn, (offset, size) in enumerate(_blocks(asked.offset, asked.length)):
            gate.breathe()
            block = buffers[turn % 2][:size]
            if problem is None:
                try:
                    transfer.read_range(path, offset, _view(block))
                except (NvmeResumeError, OSError) as error:
                    problem = error  # the other side waits for all blocks it has asked for
            limit.spend(size, gate)
            if under_way is not None:
                channel.finish(under_way)
            under_way = channel.send_block(block)
            total += size
        if under_way is not None:
            channel.finish(under_way)
        if problem is not None:
            raise problem
        channel.send(Sent())


# ---- the receiver ----


def fetch(channel: Channel, errand: Errand, options: Options, gate: Gate, progress: Progress) -> Brought:
    """Take in what the other side offers and ``errand`` asks for; what came.

    Raises what went wrong on either side: then the other side knows, unless it is a PeerError.  What had arrived stays.
    """
    with _both_know(channel, errand):
        channel.send(Hello(loose=catalog.beside(errand.save_dir, errand.tag) if errand.loose else None))
        offer = _hear(channel, Offer)
        brought = _take_in(channel, offer, errand, options, gate, progress)
        channel.send(Ask(done=True))
        return brought


def refuse(channel: Channel) -> None:
    """Say to the sender, who is about to offer something, that there is nothing to do."""
    channel.send(Hello(skip=True))


def _take_in(
    channel: Channel, offer: Offer, errand: Errand, options: Options, gate: Gate, progress: Progress
) -> Brought:
    said = str(channel.there)
    head = _decode(Manifest, offer.head, said)
    if head.tag != errand.tag:
        raise CorruptError(f"{said} offers another tag", tag=errand.tag, expected=errand.tag, found=head.tag)
    if head.checkpoint_id != errand.checkpoint_id:
        raise _another(errand, f"with {said}", head)
    if not errand.new and not errand.folder.is_dir():
        raise ReplacedError("the checkpoint was removed meanwhile", tag=errand.tag, path=str(errand.folder))
    nbytes = files = 0
    with intake.Intake(errand.save_dir, head, said, new=errand.new) as inbox:
        for rank in errand.ranks:
            if not errand.doubted and not inbox.lacks(rank):
                continue
            if rank not in offer.ranks:
                raise NoCheckpointError(f"{said} does not have this rank's part", rank=rank, tag=head.tag)
            record, seal, extras = offer.ranks[rank]
            of_rank = records.OfRank(
                _decode(RankRecord, record, said), _decode(Seal, seal, said), _decode(Extras, extras, said)
            )
            needs = inbox.needs(rank, of_rank, options)
            inbox.make_room(needs)
            for need in needs:
                arrival = inbox.arrival(rank, need)
                nbytes += _ask_for(channel, need.relative, need, arrival, gate, progress)
                files += 1
            inbox.finish_rank(rank, of_rank)
    with _loose_mutex:
        loose = _loose_needs(offer, errand, said)
        for need in loose:
            arrival = intake.Arrival(errand.save_dir, need, said, errand.tag)
            nbytes += _ask_for(channel, f"../{need.relative}", need, arrival, gate, progress)
            files += 1
        commit.sync_all([], {(errand.save_dir / need.relative).parent for need in loose})
    return Brought(nbytes, files, head)


def _loose_needs(offer: Offer, errand: Errand, said: str) -> list[Need]:
    """Files beside the tag folder that this node has nothing of; what is there stays as it is."""
    if not errand.loose:
        return []
    needs = []
    for name, seal in offer.loose.items():
        path = layout.inside(errand.save_dir, name)
        if path is None or any(part.startswith(".") for part in Path(name).parts):
            raise CorruptError(
                f"{said} offers a file outside the checkpoint", tag=errand.tag, path=name[:200]
            )
        if not path.exists():
            needs.append(Need(name, seal, 0))
    return needs


def _ask_for(
    channel: Channel,
    name: str,
    need: Need,
    arrival: intake.Arrival,
    gate: Gate,
    progress: Progress,
) -> int:
    """One file, from where it broke off; the bytes that came."""
    buffers = [torch.empty(CHUNK_BYTES, dtype=torch.uint8) for _ in range(2)]
    start = need.offset
    for window in range(start, need.known.size, _WINDOW_BYTES):
        gate.breathe()
        length = min(_WINDOW_BYTES, need.known.size - window)
        channel.send(Ask(file=name, offset=window, length=length))
        blocks = list(_blocks(window, length))
        coming: list[Any] = [channel.receive_block(buffers[0][: blocks[0][1]])]
        problem: Exception | None = None
        for turn, (offset, size) in enumerate(blocks):
            channel.finish(coming[turn])
            if turn + 1 < len(blocks):
                coming.append(channel.receive_block(buffers[(turn + 1) % 2][: blocks[turn + 1][1]]))
            if problem is None:
                try:
                    arrival.put(offset, _view(buffers[turn % 2])[:size])
                except (NvmeResumeError, OSError) as error:
                    problem = error  # the rest of the window is under way already
            progress(size)
        _hear(channel, Sent)
        if problem is not None:
            raise problem
    arrival.finish()
    return need.known.size - start


def _view(block: torch.Tensor) -> memoryview:
    array: Any = block.numpy()
    return memoryview(array)


def _blocks(offset: int, length: int) -> list[tuple[int, int]]:
    return [
        (at, min(CHUNK_BYTES, offset + length - at)) for at in range(offset, offset + length, CHUNK_BYTES)
    ]


def _decode(kind: type[manifest.R], text: Any, said: str) -> manifest.R:
    return manifest.decode(kind, str(text).encode(), said)


# ---- errors go over the wire ----


class _Heard(Exception):
    """The other end has said what is wrong, and has ended the talk."""

    def __init__(self, error: NvmeResumeError) -> None:
        super().__init__(error)
        self.error = error


def _hear(channel: Channel, kind: type[M]) -> M:
    message = channel.receive(kind)
    if message.error is not None:
        error = message.error.error(str(channel.there))
        error.rank = channel.there.rank if error.rank is None else error.rank
        raise _Heard(error)
    return message


@contextlib.contextmanager
def _both_know(channel: Channel, errand: Errand) -> Iterator[None]:
    """Let the other end know of an error, unless it comes from there or the talk itself is what failed."""
    try:
        yield
    except _Heard as heard:
        raise heard.error from None
    except (PeerError, Cancelled):
        raise
    except Exception as error:
        known = errors.of(error, f"{errand.tag} from node to node")
        if errand.live and errand.replaced and not isinstance(known, ReplacedError):
            known = ReplacedError(
                "the tag was saved again meanwhile", tag=errand.tag, path=str(errand.folder)
            )
        with contextlib.suppress(NvmeResumeError):
            channel.send(Message(error=Told.of(known)))
        if known is error:
            raise
        raise known from error


def _another(errand: Errand, where: str, found: Manifest) -> NvmeResumeError:
    """Of this run: the tag was saved again.  Of another: the tag is nothing that names one checkpoint."""
    kind = ReplacedError if errand.live else NoCheckpointError
    return kind(
        f"another checkpoint has that tag {where} now",
        tag=errand.tag,
        path=str(errand.folder),
        expected=errand.checkpoint_id,
        found=found.checkpoint_id,
        hint=None if errand.live else "remove the folder that belongs to another run",
    )
