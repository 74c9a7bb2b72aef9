"""Swap files that hold a saved state: frozen under private names until the training writes them anew.

DeepSpeed opens a swap file by its public name for every request and rewrites whole tensors.  So the inode that holds a
tensor can become the checkpoint, if the next write goes to another one.  ``link_into`` gives it a name in the
checkpoint and moves the public name aside to a private one, ``begin_read`` sends reads there, ``begin_write`` ends
that: the write goes to a fresh file under the public name.  A frozen inode never has a public name, so neither this
engine nor a later plain DeepSpeed on the same nvme_path can write into a checkpoint.  ``adopt`` is the same from the
other side: a checkpoint's file read in place of a public one.

All methods are for the training's thread, but for ``release``.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from nvme_resume import errors, layout, logs
from nvme_resume.config import Options
from nvme_resume.errors import LockedError, StorageError
from nvme_resume.storage import disk as seam
from nvme_resume.storage import locks, private, transfer
from nvme_resume.storage.private import PrivateFolder

log = logs.logger


@dataclass
class _Frozen:
    """One inode under a private name."""

    public: str
    path: Path
    nbytes: int
    shared: bool  # a checkpoint has a name for the inode as well: it must never be written to
    rewritten: bool = True  # the training will write it anew
    read: bool = True  # the public name is read from here
    holds: int = 0  # background copies that still read it
    check: Callable[[], None] | None = None  # what must be true before anything is read


class SwapFiles:
    """The swap files of one engine, by their public names."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._lock = threading.Lock()  # guards holds, spare, and the end of a _Frozen
        self._folders: dict[Path, PrivateFolder] = {}
        self._locks: dict[Path, locks.Lock] = {}  # by swap folder
        self._read: dict[str, _Frozen] = {}  # public name -> where its content is
        self._held: dict[Path, _Frozen] = {}  # private name -> being copied in the background
        self._spare: dict[tuple[PrivateFolder, int], list[Path]] = {}  # allocated files nobody needs any more
        self._room: dict[str, tuple[Future[None], int]] = {}  # fresh files being allocated, their sizes
        self._allocator: ThreadPoolExecutor | None = None

    def own(self, swap_folder: Path) -> None:
        """Be the one job that swaps there.  LockedError names the other, which is told that its files were changed."""
        if swap_folder in self._locks:
            return
        mark = layout.intruder(swap_folder)
        try:
            self._locks[swap_folder] = claim(swap_folder)
        except LockedError:
            # DeepSpeed has put this engine's first weights there already.
            with contextlib.suppress(OSError):
                seam.current().write(mark, locks.note(), sync=False)
            raise
        seam.current().remove_tree(mark)

    def refuse_intruders(self) -> None:
        """StorageError when another job has written to this engine's swap files."""
        for swap_folder in self._locks:
            mark = layout.intruder(swap_folder)
            if mark.exists():
                raise StorageError(
                    "another job has written to the swap files of this one; their state cannot be trusted any more",
                    path=str(swap_folder),
                    expected="one job for each nvme_path",
                    found=locks.describe(mark),
                    hint="end both, give one of them another nvme_path, resume this one from its last checkpoint",
                )

    def folder(self, swap_folder: Path) -> PrivateFolder:
        """The private folder for a swap folder's files, on the same filesystem."""
        root = layout.private_root(swap_folder)
        if root not in self._folders:
            private.clean(root)
            self._folders[root] = PrivateFolder(root)
        return self._folders[root]

    def source(self, public: Path) -> Path:
        """Where the present content of a swap file is.  Raises as ``begin_read`` does."""
        return Path(self.begin_read(str(public)))

    # ---- the training's own requests ----

    def begin_read(self, public: str) -> str:
        """The name to open for a read of ``public``.  CorruptError when an adopted file turned out to be damaged."""
        frozen = self._read.get(_key(public))
        if frozen is None:
            return public
        if frozen.check is not None:
            frozen.check()
            frozen.check = None
        return str(frozen.path)

    def begin_write(self, public: str, offset: int, nbytes: int) -> None:
        """Before a write to ``public``: it must find a file of its own there, with what the write leaves out.

        Raises NoSpaceError where the fresh file could not be allocated: DeepSpeed's own write would fail in silence.
        """
        key = _key(public)
        self._take_room(key)
        frozen = self._read.get(key)
        if frozen is None:
            return
        self.begin_read(public)  # an adopted file that is being verified keeps its name until that is over
        if offset != 0 or nbytes < frozen.nbytes:
            self.thaw(Path(public))
        else:
            self._end(frozen)

    # ---- save ----

    def link_into(self, public: Path, nbytes: int, target: Path, *, rewritten: bool) -> seam.Identity:
        """Make ``target`` another name of the inode that holds ``public``, and freeze that inode.

        ``rewritten``: the training will write it anew and needs room for that.  Costs no bytes.
        OSError in ``ladder.STEP_DOWN`` where that cannot be; then nothing has changed.
        """
        disk = seam.current()
        source = self.source(public)  # nothing unverified gets into a checkpoint
        frozen = self._read.get(_key(public))
        if frozen is None or not frozen.shared:
            disk.cut(source, nbytes, self.folder(public.parent).file_mode)
        disk.link(source, target)
        if frozen is None:
            try:
                frozen = self._move_aside(public, nbytes, rewritten=rewritten)
            except OSError:
                disk.remove_tree(target)
                raise
        frozen.shared = True
        return disk.identity(target)

    def hold(self, public: Path, nbytes: int, *, rewritten: bool) -> Path:
        """Freeze a swap file for a background copy; its private name.  ``release`` ends that."""
        self.source(public)  # nothing unverified gets into a checkpoint
        frozen = self._read.get(_key(public))
        if frozen is None:
            seam.current().cut(public, nbytes, self.folder(public.parent).file_mode)
            frozen = self._move_aside(public, nbytes, rewritten=rewritten)
        with self._lock:
            frozen.holds += 1
            self._held[frozen.path] = frozen
        return frozen.path

    def release(self, path: Path) -> None:
        """A background copy of ``path`` has ended.  From any thread."""
        with self._lock:
            frozen = self._held[path]
            frozen.holds -= 1
            if frozen.holds == 0:
                del self._held[path]
            ended = frozen.holds == 0 and not frozen.read
        if ended:
            self._dispose(frozen)

    def _move_aside(self, public: Path, nbytes: int, *, rewritten: bool) -> _Frozen:
        """Rename ``public`` to a private name and order a fresh file for the next write."""
        folder = self.folder(public.parent)
        frozen = _Frozen(_key(public), folder.name(public), nbytes, shared=False)
        seam.current().rename(public, frozen.path)
        self._read[frozen.public] = frozen
        if rewritten:
            self._order_room(public, nbytes)
        return frozen

    # ---- load ----

    def adopt(self, public: Path, path: Path, nbytes: int, *, shared: bool, rewritten: bool = True) -> None:
        """Read ``public`` from the private file ``path`` from now on; what ``public`` held stays as it is.

        ``shared``: a checkpoint's own file, linked; else a copy, which ``settle`` puts under the public name.
        ``rewritten``: the training will write it anew and needs room for that.
        """
        self._read[_key(public)] = _Frozen(_key(public), path, nbytes, shared=shared, rewritten=rewritten)

    def check_first(self, public: Path, check: Callable[[], None]) -> None:
        """Call ``check`` before the first read of an adopted file."""
        frozen = self._read.get(_key(public))
        if frozen is not None:
            frozen.check = check

    def mark(self) -> dict[str, object]:
        """What ``go_back`` needs to undo adoptions."""
        return dict(self._read)

    def go_back(self, mark: dict[str, object]) -> None:
        """Undo all adoptions since ``mark``; their private names are the caller's to remove."""
        self._read = {key: frozen for key, frozen in mark.items() if isinstance(frozen, _Frozen)}

    def settle(self, mark: dict[str, object]) -> None:
        """Adoptions since ``mark`` are final: copies get the public names, linked files' next writes get room.

        A copy that cannot have its public name is read under its private one; then nothing is left that can fail.
        """
        for key, frozen in list(self._read.items()):
            before = mark.get(key)
            if before is frozen:
                continue
            if isinstance(before, _Frozen):
                self._end(before, still=frozen)
            if frozen.shared:
                if frozen.rewritten:
                    self._order_room(Path(key), frozen.nbytes)
            else:
                try:
                    self._take_room(key)
                    seam.current().rename(frozen.path, Path(key))
                except (OSError, errors.NvmeResumeError):
                    if frozen.rewritten and key not in self._room:
                        self._order_room(Path(key), frozen.nbytes)
                else:
                    del self._read[key]

    def replaced(self, public: Path) -> None:
        """Somebody has written the public file as a whole."""
        frozen = self._read.get(_key(public))
        if frozen is not None:
            self._end(frozen)

    def thaw(self, public: Path) -> None:
        """Put a copy of the present content under the public name."""
        key = _key(public)
        self._take_room(key)
        frozen = self._read.get(key)
        if frozen is None:
            return
        self.begin_read(key)  # an adopted file is checked before it is copied
        copy = transfer.Copy(frozen.path, public, nbytes=frozen.nbytes)
        transfer.run([copy], self._options, what="copy of a frozen swap file", sync=False, hash=False)
        self._end(frozen)

    def thaw_all(self) -> None:
        """Put all content back under the public names, for code that goes by them."""
        for key in list(self._read):
            self.thaw(Path(key))

    # ---- room ----

    def room_for(self, files: Iterable[tuple[Path, int]]) -> int:
        """Bytes that freezing these files (public name, size) would take from their filesystem."""
        spares = Counter({key: len(paths) for key, paths in self._spare.items()})
        total = 0
        for public, nbytes in files:
            if _key(public) in self._read and (_key(public) in self._room or public.exists()):
                continue  # frozen, and its successor has been seen to
            key = (self.folder(public.parent), nbytes)
            if spares[key]:
                spares[key] -= 1
            else:
                total += nbytes
        return total

    def _order_room(self, public: Path, nbytes: int) -> None:
        """See to an allocated file under the public name, off the training's path."""
        spare = self._take_spare(public, nbytes)
        disk = seam.current()
        if spare is not None:
            try:
                disk.rename(spare, public)
            except OSError:
                log.warning("%s could not be used again as %s: allocating a fresh file", spare, public)
            else:
                return
        self._room[_key(public)] = self._submit(lambda: disk.allocate(public, nbytes)), nbytes

    def _take_spare(self, public: Path, nbytes: int) -> Path | None:
        with self._lock:
            spares = self._spare.get((self.folder(public.parent), nbytes))
            return spares.pop() if spares else None

    def _take_room(self, key: str) -> None:
        """Wait until the file under a public name is allocated, if one was ordered."""
        room = self._room.get(key)
        if room is None:
            return
        future, nbytes = room
        try:
            try:
                future.result()
            except OSError:
                # There may be space by now; without, the training's own write would fail in silence.
                seam.current().allocate(Path(key), nbytes)
        except OSError as error:
            raise errors.from_os_error(error, "no room for the next state of this swap file") from error
        del self._room[key]  # not before: without its room every attempt to write must fail

    def _submit(self, work: Callable[[], None]) -> Future[None]:
        if self._allocator is None:
            self._allocator = ThreadPoolExecutor(1, thread_name_prefix="nvme_resume-room")
        return self._allocator.submit(work)

    def _end(self, frozen: _Frozen, still: _Frozen | None = None) -> None:
        """The public name is no longer read from this inode (``still``: but from that one)."""
        if still is None:
            self._read.pop(frozen.public, None)
        with self._lock:
            frozen.read = False
            ended = frozen.holds == 0
        if ended:
            self._dispose(frozen)

    def _dispose(self, frozen: _Frozen) -> None:
        """Nobody reads the private name any more: keep the blocks for the next freeze, or let them go."""
        folder = self.folder(Path(frozen.public).parent)
        if not frozen.shared:
            with self._lock:
                spares = self._spare.setdefault((folder, frozen.nbytes), [])
                spares.append(frozen.path)
            return
        disk = seam.current()
        try:
            # Another thread: where the checkpoint is gone already, this frees the blocks and may take long.
            self._submit(lambda: disk.remove_tree(frozen.path))
        except RuntimeError:  # the interpreter is ending
            disk.remove_tree(frozen.path)

    def close(self) -> None:
        """Forget everything and remove the private folders (at the end of the engine or the process)."""
        if self._allocator is not None:
            self._allocator.shutdown()
        self._read.clear()
        for folder in self._folders.values():
            folder.close()
        self._folders.clear()
        for lock in self._locks.values():
            lock.close()
        self._locks.clear()


def claim(swap_folder: Path) -> locks.Lock:
    """Own the files below a swap folder's ``nvme_path``.  LockedError naming the owner."""
    path = layout.swap_lock(swap_folder)
    seam.current().make_folder(path.parent)
    return locks.take(
        path,
        f"the swap folder {swap_folder}",
        hint='give this job another "nvme_path", or end the other one first',
    )


def _key(public: Path | str) -> str:
    return os.path.abspath(public)  # noqa: PTH100 - no symbolic links resolved, and fast: asked for every request
