"""Run a list of copies through the native copier: progress, hashes, and errors in our own words.

Bulk bytes move only here.  A copy is a ``Copy`` that knows what it costs in bytes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import xxhash
from tqdm import tqdm

from nvme_resume import _native
from nvme_resume.config import Options
from nvme_resume.errors import CorruptError, from_os_error
from nvme_resume.manifest import FileSeal
from nvme_resume.storage.background import Gate

_PROGRESS_AFTER_SECONDS = 2.0
# Beside training: shorter requests, so that the training's own wait behind less of ours.
_BACKGROUND_BLOCK_MIB = 8
_BACKGROUND_IN_FLIGHT = 2


@dataclass(frozen=True)
class Copy:
    """Copy ``nbytes`` (-1: all) from ``src`` to ``dst``; ``dst=None`` reads and hashes only."""

    src: Path
    dst: Path | None = None
    nbytes: int = -1
    src_offset: int = 0
    dst_offset: int = 0
    truncate: bool = True  # False: write a range into a file that is already there


def run(
    copies: Sequence[Copy],
    options: Options,
    *,
    what: str,
    sync: bool,
    hash: bool = True,
    buffered: bool = False,
    show: bool = False,
    gate: Gate | None = None,
    live: bool = False,
) -> list[FileSeal]:
    """Run all copies; one FileSeal (size, hashes) for each, in order, or none at all when ``hash`` is False.

    ``what`` names the work on the progress bar, which appears after two seconds when ``show`` and the output
    is a terminal.  ``buffered`` keeps to the page cache (files just written by torch are still in it).
    ``gate``: for background threads; the copier then gives way to the training's own I/O and to every other thread.
    ``live``: the sources are the training's own files, or those of a checkpoint that is not committed yet.
    Raises NoSpaceError, CorruptError (a source shorter than asked) or StorageError naming file and offset.
    """
    if not copies:
        return []
    transfer = _native.Transfer(
        [
            _native.Job(
                str(c.src),
                None if c.dst is None else str(c.dst),
                src_offset=c.src_offset,
                dst_offset=c.dst_offset,
                length=c.nbytes,
                truncate=c.truncate,
            )
            for c in copies
        ],
        block_bytes=min(options.block_mib, _BACKGROUND_BLOCK_MIB if gate else options.block_mib) << 20,
        in_flight=min(options.in_flight, _BACKGROUND_IN_FLIGHT) if gate else options.in_flight,
        engine=options.engine,
        direct="off" if buffered else options.direct,
        sync=sync,
        hash=hash,
        bandwidth_limit=int(options.bandwidth_limit_mib * (1 << 20)),
        low_priority=gate is not None and not gate.urgent,
    )
    try:
        if gate is None and buffered:
            results = transfer.run()  # small files, in memory: not worth a thread
        elif gate is None:
            results = _interruptible(transfer, what, show=show)
        else:
            with gate.running(transfer):
                results = transfer.run()
    except OSError as error:
        raise from_os_error(error, what, live=live) from error
    if not hash:
        return []
    return [FileSeal(size=r.bytes, digest=r.digest, chunks=r.chunk_digests.hex()) for r in results]


def _interruptible(transfer: _native.Transfer, what: str, *, show: bool) -> list[_native.FileResult]:
    """Run in a thread, so that Ctrl-C and SIGTERM handlers are served; whatever interrupts cancels the transfer."""
    start = time.monotonic()
    bar: tqdm | None = None
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(transfer.run)
        try:
            while not wait([future], timeout=0.2).done:
                if (
                    bar is None
                    and show
                    and sys.stderr.isatty()
                    and time.monotonic() - start > _PROGRESS_AFTER_SECONDS
                ):
                    total = transfer.progress()[1]
                    bar = tqdm(
                        total=total, unit="B", unit_scale=True, unit_divisor=1024, desc=what, leave=False
                    )
                if bar is not None:
                    bar.update(transfer.progress()[0] - bar.n)
            return future.result()
        except BaseException:
            transfer.cancel()
            raise
        finally:
            if bar is not None:
                bar.close()


class RunningSeal:
    """The seal of content that comes piece by piece."""

    def __init__(self) -> None:
        self._size = 0
        self._chunks: list[bytes] = []
        self._open = xxhash.xxh3_128()
        self._filled = 0  # bytes of the chunk that is open

    def add(self, piece: bytes | memoryview) -> None:
        """What comes next."""
        view = memoryview(piece).cast("B")
        self._size += len(view)
        while len(view):
            part = view[: _native.CHUNK_BYTES - self._filled]
            self._open.update(part)
            self._filled += len(part)
            if self._filled == _native.CHUNK_BYTES:
                self._end_chunk()
            view = view[len(part) :]

    def seal(self) -> FileSeal:
        """Size and hashes, when all of it was added."""
        if self._filled:
            self._end_chunk()
        joined = b"".join(self._chunks)
        return FileSeal(size=self._size, digest=_native.digest_of_chunks(joined), chunks=joined.hex())

    def _end_chunk(self) -> None:
        self._chunks.append(self._open.digest())
        self._open, self._filled = xxhash.xxh3_128(), 0


def hash_of(content: memoryview) -> FileSeal:
    """The seal of a file with this content."""
    running = RunningSeal()
    running.add(content)
    return running.seal()


def digest_of_chunks(chunks: str) -> str:
    """The digest of a file from the hashes of its chunks (hexadecimal, 32 digits each; nothing else)."""
    return _native.digest_of_chunks(bytes.fromhex(chunks))


def write_padded(path: Path, data: memoryview, size: int, *, offset: int = 0) -> None:
    """Put ``data`` at ``offset`` into ``path`` and make the file ``size`` bytes long (zeros beyond)."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        position = 0
        while position < len(data):
            position += os.pwrite(descriptor, data[position : position + (64 << 20)], offset + position)
        os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)


def read_range(path: Path, offset: int, into: memoryview) -> None:
    """Fill ``into`` from ``path`` at ``offset``; CorruptError when the file ends before."""
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        position = 0
        while position < len(into):
            count = file.readinto(into[position : position + (64 << 20)])
            if not count:
                raise CorruptError(
                    "file ends too early",
                    path=str(path),
                    offset=offset + position,
                    expected=f"{len(into)} bytes from {offset}",
                    found=position,
                )
            position += count
