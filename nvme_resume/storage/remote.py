"""A folder under a URL, by fsspec: object storage, or any file system that it knows.

Objects appear when they are complete and are replaced whole; nothing is renamed.  Everything is asynchronous: fsspec's
file objects block, so each of their calls runs in a thread, and memory stays at one block a file in flight.  Nothing is
believed from a listing that was made before: other nodes write there as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import aiofiles
import fsspec
from fsspec.registry import known_implementations

from nvme_resume.errors import ConfigError, CorruptError, NvmeResumeError, StorageError
from nvme_resume.manifest import FileSeal
from nvme_resume.storage import disk as seam
from nvme_resume.storage import transfer, verify

T = TypeVar("T")
I = TypeVar("I")  # noqa: E741 - an item

BLOCK_BYTES = 8 << 20  # two chunks of the format
IN_FLIGHT = 4  # files at a time
_MOST_PARTS = 9000  # S3 allows 10,000 parts an object
# Names with slashes are all they have; asking them for a folder may make a bucket.
_NO_FOLDERS = {
    "s3",
    "s3a",
    "gs",
    "gcs",
    "abfs",
    "abfss",
    "az",
    "adl",
    "oci",
    "oss",
    "obs",
    "memory",
    "http",
    "https",
}
_HINT = "look at the URL, at the credentials in the environment, and at the network"


def is_url(text: object) -> bool:
    """Is it a URL, not a path?"""
    return isinstance(text, str) and "://" in text


def check(url: str) -> None:
    """ConfigError unless this Python can speak the URL's protocol.  Asks nobody."""
    Remote(url)


class Remote:
    """A folder under a URL.

    Methods raise StorageError naming the URL when it does not answer as it should; what is not there is None.
    """

    def __init__(
        self,
        url: str,
        breathe: Callable[[], None] = lambda: None,
        spend: Callable[[int], None] = lambda _: None,
    ) -> None:
        """``breathe`` is called between blocks, ``spend`` with the bytes that are about to go there: both may wait, or
        raise to end the work."""
        self.url = url.rstrip("/")
        self.breathe, self._spend = breathe, spend
        self._fs, self._root = _connect(self.url)

    def at(self, *names: str) -> Remote:
        """A folder below, by the same connection."""
        below = Remote.__new__(Remote)
        below.url, below._fs = "/".join([self.url, *names]), self._fs
        below.breathe, below._spend = self.breathe, self._spend
        below._root = "/".join([self._root, *names])
        return below

    def path(self, relative: str) -> str:
        """What errors call it."""
        return f"{self.url}/{relative}"

    # ---- small objects ----

    async def names(self, relative: str = "") -> list[str]:
        """What lies in a folder; nothing where there is none."""
        where = f"{self._root}/{relative}".rstrip("/")

        def ask() -> list[str]:
            self._fs.invalidate_cache()
            found = self._fs.ls(where, detail=False)
            self._fs.invalidate_cache()
            return [str(name).rstrip("/").rpartition("/")[2] for name in found]

        return await self._do("list", relative, ask) or []

    async def find(self) -> list[str]:
        """All objects below, by relative path."""

        def ask() -> list[str]:
            self._fs.invalidate_cache()
            found = [str(path) for path in self._fs.find(self._root)]
            self._fs.invalidate_cache()
            return [path[len(self._root) + 1 :] for path in found if path.startswith(f"{self._root}/")]

        return await self._do("list", "", ask) or []

    async def size(self, relative: str) -> int | None:
        """Bytes of an object."""

        def ask() -> int | None:
            self._fs.invalidate_cache()
            info = self._fs.info(self._at(relative))
            return int(info["size"]) if info["type"] == "file" else None

        return await self._do("look at", relative, ask)

    async def read(self, relative: str, limit: int) -> bytes | None:
        """A small object.  CorruptError when it has more than ``limit`` bytes."""

        def ask() -> bytes:
            with self._open(relative) as file:
                data: bytes = file.read(limit + 1)
            return data

        data = await self._do("read", relative, ask)
        if data is not None and len(data) > limit:
            raise CorruptError(
                "larger than it can be", path=self.path(relative), expected=f"<= {limit} bytes"
            )
        return data

    async def write(self, relative: str, data: bytes) -> None:
        """Put a small object there, all at once, and read it again."""

        def ask() -> bool:
            self._make_parent(relative)
            path = self._at(relative)
            if self._is_local:  # a file system shows what is half written
                temporary = Path(f"{path}.tmp-upload")
                seam.current().remove_tree(temporary)
                seam.current().write(temporary, data)
                seam.current().rename(temporary, Path(path))
                seam.current().sync_folder(temporary.parent)
            else:
                self._fs.pipe_file(path, data)
            return True

        await self._must("write", relative, ask)
        if await self.read(relative, len(data)) != data:
            raise StorageError("what was written there reads otherwise", path=self.path(relative), hint=_HINT)

    async def remove(self, relative: str) -> None:
        """Remove an object; one that is gone is fine."""
        await self._do("remove", relative, lambda: self._fs.rm_file(self._at(relative)))

    # ---- large ones ----

    async def put(
        self, relative: str, source: Path, known: FileSeal | None, *, rank: int | None, tag: str
    ) -> None:
        """Put a local file there, while its content is compared with what it was when it was saved.

        Raises CorruptError before the object appears when the file is not ``known``; OSError when it cannot be read.
        """
        size = seam.current().size(source)
        block = max(BLOCK_BYTES, -(-size // _MOST_PARTS) + 1)

        def begin() -> Any:
            self._make_parent(relative)
            return self._fs.open(self._at(relative), "wb", block_size=block)

        file = await self._must("write", relative, begin)
        seen = transfer.RunningSeal()
        try:
            async with aiofiles.open(source, "rb") as reader:
                while data := await reader.read(BLOCK_BYTES):
                    await in_thread(self.breathe)
                    await in_thread(partial(self._spend, len(data)))
                    seen.add(data)
                    await self._must("write", relative, partial(file.write, data))
            if known is not None:
                verify.compare(source, known, seen.seal(), rank=rank or 0, tag=tag)
            await self._must("write", relative, lambda: _finish(file))
        except BaseException:
            await in_thread(lambda: self._abandon(file, relative))
            raise

    async def hash(self, relative: str) -> FileSeal | None:
        """Size and hashes of an object, by reading it."""
        seen = transfer.RunningSeal()

        async def take(offset: int, block: bytes) -> None:
            seen.add(block)

        return seen.seal() if await self.each_block(relative, 0, take) else None

    async def each_block(
        self, relative: str, offset: int, take: Callable[[int, bytes], Awaitable[None]]
    ) -> bool:
        """Give an object's content from ``offset`` on to ``take``, in blocks of two chunks; False without such one."""
        file = await self._do("read", relative, lambda: self._open(relative))
        if file is None:
            return False
        try:
            if offset:
                await self._must("read", relative, lambda: file.seek(offset))
            while True:
                await in_thread(self.breathe)
                block: bytes = await self._must("read", relative, lambda: _read_whole(file))
                if not block:
                    return True
                await take(offset, block)
                offset += len(block)
        finally:
            await in_thread(file.close)

    # ---- inside ----

    @property
    def _is_local(self) -> bool:
        return isinstance(self._fs, fsspec.get_filesystem_class("file"))

    def _at(self, relative: str) -> str:
        return f"{self._root}/{relative}"

    def _open(self, relative: str) -> Any:
        self._fs.invalidate_cache()
        return self._fs.open(self._at(relative), "rb", block_size=BLOCK_BYTES, cache_type="none")

    def _make_parent(self, relative: str) -> None:
        protocols = self._fs.protocol if isinstance(self._fs.protocol, tuple | list) else (self._fs.protocol,)
        if not _NO_FOLDERS & set(protocols):
            self._fs.makedirs(self._at(relative).rpartition("/")[0], exist_ok=True)

    def _abandon(self, file: Any, relative: str) -> None:
        """Let go of an object that is half written, so that it never appears; on a file system it goes."""
        with contextlib.suppress(Exception):
            file.discard()
        if isinstance(file, io.IOBase):
            with contextlib.suppress(Exception):
                file.closed = True  # type: ignore[misc]  # or its finalizer would complete the object
        if self._is_local:
            with contextlib.suppress(Exception):
                file.close()
            with contextlib.suppress(Exception):
                self._fs.rm_file(self._at(relative))

    async def _must(self, verb: str, relative: str, ask: Callable[[], T]) -> T:
        """What comes back, or StorageError."""
        try:
            return await in_thread(ask)
        except (NvmeResumeError, asyncio.CancelledError):
            raise
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise StorageError(
                f"cannot {verb} it: {type(error).__name__}: {reason[:500]}",
                path=self.path(relative),
                hint=_HINT,
            ) from error

    async def _do(self, verb: str, relative: str, ask: Callable[[], T]) -> T | None:
        """The same; None where nothing is there."""

        def ask_softly() -> T | None:
            try:
                return ask()
            except (FileNotFoundError, NotADirectoryError):
                return None

        return await self._must(verb, relative, ask_softly)


async def hash_file(path: Path) -> FileSeal:
    """Size and hashes of a local file.  OSError."""
    seen = transfer.RunningSeal()
    async with aiofiles.open(path, "rb") as reader:
        while data := await reader.read(BLOCK_BYTES):
            seen.add(data)
    return seen.seal()


async def in_thread(work: Callable[[], T]) -> T:
    """Run what blocks in a thread; when this is cancelled, wait for the thread: it may use what is closed next."""
    future = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        if not future.cancelled():
            future.exception()  # looked at, or asyncio logs it, with its trace, whenever memory is collected
        raise


async def each(items: Iterable[I], work: Callable[[I], Awaitable[T]], in_flight: int = IN_FLIGHT) -> list[T]:
    """``work`` for all items, some at a time; the first error is raised when all others have ended."""
    limit = asyncio.Semaphore(in_flight)

    async def one(item: I) -> T:
        async with limit:
            return await work(item)

    tasks = [asyncio.ensure_future(one(item)) for item in items]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _connect(url: str) -> tuple[Any, str]:
    protocol = url.partition("://")[0].rpartition("::")[2]
    try:
        # A connection of our own: those that fsspec keeps are shared with the training's threads.
        fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True)
    except ImportError as error:
        known = known_implementations.get(protocol, {})
        package = str(known.get("class", "")).partition(".")[0]
        install = (
            f"pip install {package}" if package and package != "fsspec" else str(known.get("err", error))
        )
        raise ConfigError(
            f"{protocol}:// needs a package that is not installed", path=url, found=str(error), hint=install
        ) from error
    except Exception as error:
        raise ConfigError(
            "not a URL that fsspec can open",
            path=url,
            expected="s3://bucket/folder, gs://..., file:///folder, ...",
            found=f"{type(error).__name__}: {error}",
        ) from error
    return fs, str(root).rstrip("/")


def _finish(file: Any) -> bool:
    """The object appears."""
    file.close()
    return True


def _read_whole(file: Any) -> bytes:
    """A block; short only at the end."""
    parts: list[bytes] = []
    missing = BLOCK_BYTES
    while missing and (part := file.read(missing)):
        parts.append(part)
        missing -= len(part)
    return b"".join(parts) if len(parts) != 1 else parts[0]
