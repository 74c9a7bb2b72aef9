"""The one seam to the file system for everything but bulk bytes (those are the native copier's).

``disk`` is the real thing; tests put a failing one in its place with ``replaced``.  Methods raise OSError and
never retry (but for removals): a failed fsync means the kernel may have dropped the data, and asking again would say
"fine".
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_FICLONE = 0x40049409
_REMOVALS = 10


@dataclass(frozen=True)
class Identity:
    """What tells a file that was written to from one that was not (its ctime changes with its names, too)."""

    inode: int
    size: int
    mtime_ns: int


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


class Disk:
    """Durable small-file operations on a POSIX file system."""

    def write(self, path: Path, data: bytes, *, sync: bool = True) -> None:
        """Create ``path`` with ``data`` and fsync it (the entry in its folder is not synced here)."""
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())

    def read(self, path: Path, limit: int) -> bytes:
        """Whole content of a regular file; symbolic links are refused, more than ``limit`` bytes too."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(path))
            if info.st_size > limit:
                raise OSError(errno.EFBIG, f"larger than {limit} bytes", str(path))
            return file.read()

    def write_at(self, path: Path, offset: int, data: memoryview) -> None:
        """Write into a file (made if need be) that nobody syncs here."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(descriptor, data[done:], offset + done)
        finally:
            os.close(descriptor)

    def size(self, path: Path) -> int:
        """Size in bytes of a regular file (symbolic links are refused)."""
        info = os.lstat(path)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return info.st_size

    def identity(self, path: Path) -> Identity:
        """Which file this is, and whether it has been written to."""
        info = os.lstat(path)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return Identity(info.st_ino, info.st_size, info.st_mtime_ns)

    def cut(self, path: Path, size: int, mode: int) -> None:
        """Make a file ``size`` bytes long with permission bits ``mode``, touching only what is not so already."""
        info = path.stat()
        if info.st_size < size:
            raise OSError(errno.EIO, f"is {info.st_size} bytes long, not {size}", str(path))
        if info.st_size > size:
            os.truncate(path, size)
        if stat.S_IMODE(info.st_mode) != mode:
            path.chmod(mode)

    def link(self, source: Path, target: Path) -> None:
        """A second name for the same file; never overwrites."""
        os.link(source, target)

    def clone(self, source: Path, target: Path) -> None:
        """FICLONE: a new file that shares the blocks of another until one of them is written to."""
        with source.open("rb") as reader, target.open("xb") as writer:
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())

    def server_copy(self, source: Path, target: Path, size: int) -> None:
        """copy_file_range: the file system (or the file server) copies by itself."""
        with source.open("rb") as reader, target.open("xb") as writer:
            done = 0
            while done < size:
                count = os.copy_file_range(reader.fileno(), writer.fileno(), size - done)
                if count == 0:
                    raise OSError(errno.EIO, f"ends after {done} bytes, not {size}", str(source))
                done += count

    def allocate(self, path: Path, size: int) -> None:
        """Give a file (created if need be) its blocks now: writing it later neither fails nor waits for them."""
        with path.open("ab") as file:
            if _libc().fallocate(file.fileno(), 0, ctypes.c_long(0), ctypes.c_long(size)) == 0:
                return
            code = ctypes.get_errno()
            if code not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise OSError(code, os.strerror(code), str(path))

    def sync_file(self, path: Path) -> None:
        """fsync a file that somebody else wrote."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def sync_folder(self, path: Path) -> None:
        """fsync a folder: makes the entries in it durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def make_folder(self, path: Path) -> None:
        """mkdir -p."""
        path.mkdir(parents=True, exist_ok=True)

    def rename(self, source: Path, target: Path) -> None:
        """rename(2): atomic, replaces a file or an empty folder."""
        source.rename(target)

    def exchange(self, one: Path, other: Path) -> bool:
        """Swap two names atomically; False where the file system cannot (then nothing happened)."""
        result = _libc().renameat2(
            ctypes.c_int(_AT_FDCWD),
            ctypes.c_char_p(os.fsencode(one)),
            ctypes.c_int(_AT_FDCWD),
            ctypes.c_char_p(os.fsencode(other)),
            ctypes.c_uint(_RENAME_EXCHANGE),
        )
        if result == 0:
            return True
        code = ctypes.get_errno()
        if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            return False
        raise OSError(code, os.strerror(code), str(other))

    def remove_tree(self, path: Path) -> None:
        """rm -r of a folder or a file; one that is already gone is fine."""
        with contextlib.suppress(FileNotFoundError):
            if path.is_dir() and not path.is_symlink():
                _remove_folder(path)
            else:
                path.unlink()

    def names(self, path: Path) -> list[str]:
        """What is in a folder."""
        return [entry.name for entry in path.iterdir()]

    def device(self, path: Path) -> int:
        """Number of the file system that holds ``path`` (a btrfs subvolume has its own)."""
        return path.stat().st_dev

    def writable(self, path: Path) -> bool:
        """May this process make files in a folder?  False on a read-only file system, too."""
        return os.access(path, os.W_OK | os.X_OK)

    def free_files(self, path: Path) -> int | None:
        """Files that may still be made on the file system of ``path``; None where there is no such limit."""
        info = os.statvfs(path)
        return info.f_favail if info.f_files else None

    def free_bytes(self, path: Path) -> int:
        """Bytes an unprivileged process may still write on the file system of ``path``."""
        info = os.statvfs(path)
        return info.f_bavail * info.f_frsize


def _remove_folder(path: Path) -> None:
    """Again where files came or went meanwhile: the hashes of a checkpoint may be written while it is removed."""
    for _ in range(_REMOVALS):
        try:
            shutil.rmtree(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                raise
        if not path.exists():
            return
    raise OSError(errno.ENOTEMPTY, "somebody adds files to it", str(path))


disk: Disk = Disk()


def current() -> Disk:
    """The disk in use."""
    return disk


@contextlib.contextmanager
def replaced(other: Disk) -> Iterator[None]:
    """Use another disk for a while (tests: one that fails at a chosen call)."""
    global disk
    previous, disk = disk, other
    try:
        yield
    finally:
        disk = previous
