"""Disks that do everything really, in one folder, and keep a log of it for ``model``."""

from __future__ import annotations

import contextlib
import os
import random
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nvme_resume.manifest import FileSeal, Manifest
from nvme_resume.storage import commit, prune, transfer
from nvme_resume.storage import disk as seam
from tests.crash.model import ROOT, Content, Entries, Log, Mark, SyncFile, SyncFolder

_Name = tuple[int, str]


class RecordingDisk(seam.Disk):
    """Records what is done below ``root``, whose first state counts as durable.

    Whatever changes without a call (files of torch.save, the native copier's) is found by looking at all files before
    and after each call, and is recorded as not synced.  Rename and exchange are single steps; the removal of a tree is
    one for each name, in random order.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = Log()
        self._mutex = threading.RLock()
        self._dice = random.Random(str(root.name))
        self._ids: dict[int, int] = {}  # of real inodes
        self._held: list[int] = []  # descriptors: an inode number is not used again while one is open
        self._names: dict[_Name, int] = {}
        self._stats: dict[int, tuple[int, int, int]] = {}
        self._folders = self.log.folders
        self._remember(root)
        self.scan()
        self.log.names = dict(self._names)
        self.log.files = {s.inode: s.key for s in self.log.steps if isinstance(s, Content)}
        self.log.steps.clear()

    def close(self) -> None:
        for descriptor in self._held:
            os.close(descriptor)
        self._held.clear()

    # ---- what is there ----

    def _remember(self, path: Path) -> int:
        """The id of an inode."""
        info = os.lstat(path)
        if info.st_ino not in self._ids:
            self._held.append(os.open(path, os.O_PATH | os.O_NOFOLLOW))
            self._ids[info.st_ino] = len(self._ids) + ROOT
            if stat.S_ISDIR(info.st_mode):
                self._folders.add(self._ids[info.st_ino])
        return self._ids[info.st_ino]

    def _walk(self) -> Iterator[tuple[_Name, Path]]:
        todo = [self.root]
        while todo:
            folder = todo.pop()
            with contextlib.suppress(FileNotFoundError):
                number = self._remember(folder)
                for path in sorted(folder.iterdir()):
                    yield (number, path.name), path
                    if path.is_dir() and not path.is_symlink():
                        todo.append(path)

    def scan(self) -> None:
        """Record all differences to what was known."""
        with self._mutex:
            now: dict[_Name, int] = {}
            files: dict[int, Path] = {}
            for name, path in self._walk():
                with contextlib.suppress(FileNotFoundError):
                    now[name] = self._remember(path)
                    if now[name] not in self._folders:
                        files[now[name]] = path
            self._record_names(now)
            for inode, path in files.items():
                self._record_content(inode, path)

    def _record_names(self, now: dict[_Name, int]) -> None:
        gone = [name for name in self._names if name not in now]
        for name, inode in now.items():
            if self._names.get(name) == inode:
                continue
            changes: list[tuple[int, str, int | None]] = [(*name, inode)]
            source = next((n for n in gone if self._names[n] == inode), None)
            if source is not None:  # somebody's rename
                gone.remove(source)
                changes.append((*source, None))
            self.log.steps.append(Entries(tuple(changes)))
        self._dice.shuffle(gone)
        # Files before folders, folders from below.
        depth = {n: self._depth(n) for n in gone}
        gone.sort(
            key=lambda n: (
                self._names[n] in self._folders,
                -depth[n] if self._names[n] in self._folders else 0,
            )
        )
        self.log.steps += [Entries(((*name, None),)) for name in gone]
        self._names = now

    def _depth(self, name: _Name) -> int:
        parents = {inode: folder for (folder, _), inode in self._names.items() if inode in self._folders}
        depth, folder = 0, name[0]
        while folder in parents and depth < 100:
            depth, folder = depth + 1, parents[folder]
        return depth

    def _record_content(self, inode: int, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            info = path.stat()
            facts = info.st_size, info.st_mtime_ns, info.st_ctime_ns
            if self._stats.get(inode) == facts:
                return
            key = self.log.store.put(path.read_bytes())
            self._stats[inode] = facts
            last = next(
                (s.key for s in reversed(self.log.steps) if isinstance(s, Content) and s.inode == inode), None
            )
            if key != (self.log.files.get(inode) if last is None else last):
                self.log.steps.append(Content(inode, key))

    def _known(self, path: Path) -> int | None:
        with contextlib.suppress(FileNotFoundError):
            return self._ids.get(path.stat().st_ino)
        return None

    def _name(self, path: Path) -> _Name | None:
        folder = self._known(path.parent)
        return None if folder is None else (folder, path.name)

    def mark(self, mark: Mark) -> None:
        with self._mutex:
            self.scan()
            self.log.steps.append(mark)

    def contents(self, folder: Path) -> tuple[tuple[str, str], ...]:
        """Path below ``folder`` and content of every file there, as it is now."""
        with self._mutex:
            return tuple(
                (str(p.relative_to(folder)), self.log.store.put(p.read_bytes()))
                for p in sorted(folder.rglob("*"))
                if p.is_file()
            )

    # ---- the seam ----

    @contextlib.contextmanager
    def _observed(self) -> Iterator[None]:
        with self._mutex:
            self.scan()
            try:
                yield
            finally:
                self.scan()

    def write(self, path: Path, data: bytes, *, sync: bool = True) -> None:
        with self._mutex:
            with self._observed():
                super().write(path, data, sync=sync)
            if sync:
                self.synced(path)

    def cut(self, path: Path, size: int, mode: int) -> None:
        with self._observed():
            super().cut(path, size, mode)

    def link(self, source: Path, target: Path) -> None:
        with self._observed():
            super().link(source, target)

    def clone(self, source: Path, target: Path) -> None:
        with self._observed():
            super().clone(source, target)

    def server_copy(self, source: Path, target: Path, size: int) -> None:
        with self._observed():
            super().server_copy(source, target, size)

    def allocate(self, path: Path, size: int) -> None:
        with self._observed():
            super().allocate(path, size)

    def make_folder(self, path: Path) -> None:
        with self._observed():
            super().make_folder(path)

    def remove_tree(self, path: Path) -> None:
        with self._observed():
            super().remove_tree(path)

    def rename(self, source: Path, target: Path) -> None:
        with self._observed():
            inode, old, new = self._known(source), self._name(source), self._name(target)
            super().rename(source, target)
            if inode is None or old is None or new is None:
                return
            self._step(((*old, None), (*new, inode)))

    def exchange(self, one: Path, other: Path) -> bool:
        with self._observed():
            first, second = self._known(one), self._known(other)
            names = self._name(one), self._name(other)
            if not super().exchange(one, other):
                return False
            if first is not None and second is not None and names[0] is not None and names[1] is not None:
                self._step(((*names[0], second), (*names[1], first)))
            return True

    def _step(self, changes: tuple[tuple[int, str, int | None], ...]) -> None:
        self.log.steps.append(Entries(changes))
        for folder, name, inode in changes:
            if inode is None:
                self._names.pop((folder, name), None)
            else:
                self._names[folder, name] = inode

    def sync_file(self, path: Path) -> None:
        with self._mutex:
            self.scan()  # what is written from now on may come too late
            super().sync_file(path)
            self.synced(path)

    def synced(self, path: Path) -> None:
        """``path`` was fsynced with what it held when it was last looked at."""
        with self._mutex:
            inode = self._known(path)
            if inode is not None:
                self.log.steps.append(SyncFile(inode))

    def sync_folder(self, path: Path) -> None:
        with self._mutex:
            self.scan()
            super().sync_folder(path)
            inode = self._known(path)
            if inode is not None:
                self.log.steps.append(SyncFolder(inode))


@contextlib.contextmanager
def recorded(disk: RecordingDisk) -> Iterator[None]:
    """Everything goes through ``disk``: the seam, the copier's fsyncs, the marks of what was promised when."""
    run, publish, remove = transfer.run, commit.publish, prune.remove

    def watched_run(copies: Sequence[transfer.Copy], *args: Any, **kwargs: Any) -> list[FileSeal]:
        found = run(copies, *args, **kwargs)
        if kwargs["sync"]:
            disk.scan()
            for copy in copies:
                if copy.dst is not None:
                    disk.synced(copy.dst)
        return found

    def watched_publish(save_dir: Path, staging: str, manifest: Manifest, *, save_latest: bool) -> Path:
        truth = disk.contents(save_dir / staging)
        disk.mark(Mark("begin", manifest.tag, manifest.checkpoint_id, truth))
        path = publish(save_dir, staging, manifest, save_latest=save_latest)
        disk.mark(Mark("committed", manifest.tag, manifest.checkpoint_id))
        return path

    def watched_remove(save_dir: Path, tag: str) -> None:
        disk.mark(Mark("removing", tag))
        remove(save_dir, tag)
        disk.mark(Mark("removed", tag))

    transfer.run, commit.publish, prune.remove = watched_run, watched_publish, watched_remove
    try:
        with seam.replaced(disk):
            yield
        disk.scan()
    finally:
        transfer.run, commit.publish, prune.remove = run, publish, remove
