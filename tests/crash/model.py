"""A model of a file system that loses what was not synced: a log of small steps, and the states a crash may leave.

The log is in terms of inodes: ``Entries`` changes names in folders, ``Content`` changes what is in a file, ``SyncFile``
and ``SyncFolder`` make durable what came before them, ``Mark`` notes what the software under test promised by then.
A crash after any prefix of the log leaves, by these rules:

- a file holds what it held at its last fsync.  Of later writes any may be there or not: the file is as it was then, as
  it is now, shorter, zeros, or a mixture by pages.  A file that was never fsynced may be empty.
- one step on names (create, mkdir, link, unlink, rename, exchange) happens as a whole or not at all: a rename is old or
  new, never neither, never both.
- a step on names is durable once every folder it changed was fsynced.  Before that each is there or not by itself, in
  any combination, with one exception: a step that moves or removes a name comes with the step that made this name.
- fsync of a file promises its content, not its name; fsync of a folder promises the names in it, not what is in the
  files or below the folders there, and not its own name.

That is what POSIX leaves open and weaker than what ext4 and xfs do (one journal, in order), so that what holds here
does not rest on a journal.  Sources: dropping all that is not synced is leveldb's ``db/fault_injection_test.cc`` (which
also removes files made since the last fsync of their folder); reordering of names and torn content are the abstract
persistence models of Pillai et al., "All File Systems Are Not Created Equal" (ALICE), OSDI 2014, where renames are
atomic on all file systems looked at but ext2.  Not modelled: writes torn below the page, disks that lie about a flush.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

ROOT = 0  # the inode of the folder everything lies below
PAGE = 4096
EMPTY: str = xxhash.xxh3_128_hexdigest(b"")


@dataclass(frozen=True)
class Entries:
    """Names changed at once: (folder, name, inode or None)."""

    changes: tuple[tuple[int, str, int | None], ...]


@dataclass(frozen=True)
class Content:
    """What a file holds from now on, as a key of the store."""

    inode: int
    key: str


@dataclass(frozen=True)
class SyncFile:
    inode: int


@dataclass(frozen=True)
class SyncFolder:
    inode: int


@dataclass(frozen=True)
class Mark:
    """Something the software said.  ``truth``: the content of the checkpoint in question, by relative path."""

    what: str
    tag: str
    checkpoint_id: str = ""
    truth: tuple[tuple[str, str], ...] = ()


Step = Entries | Content | SyncFile | SyncFolder | Mark


class Store:
    """Contents by their hash."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {EMPTY: b""}

    def put(self, data: bytes) -> str:
        key: str = xxhash.xxh3_128_hexdigest(data)
        self.contents.setdefault(key, data)
        return key


@dataclass
class Log:
    """What was done, from a first state that is durable."""

    files: dict[int, str] = field(default_factory=dict)  # inode -> content, at the start
    names: dict[tuple[int, str], int] = field(default_factory=dict)  # at the start
    folders: set[int] = field(default_factory=lambda: {ROOT})
    steps: list[Step] = field(default_factory=list)
    store: Store = field(default_factory=Store)


Tree = dict[str, str | None]  # path -> content key, None for a folder


@dataclass(frozen=True)
class Crash:
    """One state that a crash after ``prefix`` steps may leave."""

    prefix: int
    how: str
    tree: Tree


def _folders(step: Step) -> set[int]:
    return {folder for folder, _, _ in step.changes} if isinstance(step, Entries) else set()


def _matters(log: Log, top: str) -> set[int]:
    """Inodes that ever had a name below the folder ``top`` of the root, and the root for that name itself."""
    names = [(folder, name, inode) for (folder, name), inode in log.names.items()]
    names += [change for step in log.steps if isinstance(step, Entries) for change in step.changes]
    found = {inode for folder, name, inode in names if (folder, name) == (ROOT, top)}
    while True:
        more = {inode for folder, _, inode in names if folder in found and inode is not None} - found
        if not more:
            return {inode for inode in found if inode is not None} | {ROOT}
        found |= more


class _Open:
    """What is not durable after a prefix: steps on names, and files with writes since their fsync."""

    def __init__(self, log: Log, prefix: int, matters: set[int]) -> None:
        self.log, self.prefix = log, prefix
        self.base: dict[int, str] = dict(log.files)  # content at the last fsync
        self.written: dict[int, str] = {}  # content now, where that differs in time
        made_by: dict[tuple[int, str], int] = {}
        self.needs: dict[int, set[int]] = {}
        waiting: dict[int, set[int]] = {}  # step -> folders yet to be synced
        for index, step in enumerate(log.steps[:prefix]):
            if isinstance(step, Entries):
                keys = [(folder, name) for folder, name, _ in step.changes]
                taken = [key for key, change in zip(keys, step.changes, strict=True) if change[2] is None]
                swapped = keys if len(keys) > 1 and not taken else []
                self.needs[index] = {made_by[k] for k in (*taken, *swapped) if k in made_by}
                made_by |= dict.fromkeys(keys, index)
                waiting[index] = {folder for folder, _ in keys}
            elif isinstance(step, Content):
                self.written[step.inode] = step.key
            elif isinstance(step, SyncFile):
                if step.inode in self.written:
                    self.base[step.inode] = self.written.pop(step.inode)
            elif isinstance(step, SyncFolder):
                for folders in waiting.values():
                    folders.discard(step.inode)
        self.durable = {index for index, folders in waiting.items() if not folders}
        # Names and files whose fate can be seen in the end.
        self.names = [
            index for index in waiting if index not in self.durable and matters & _folders(log.steps[index])
        ]
        self.files = sorted(self.written.keys() & matters)

    def tree(self, names: set[int], contents: dict[int, str]) -> Tree:
        """The state with these steps on names beside the durable ones, and these contents instead of the synced."""
        chosen = self._closed(self.durable | names)
        entries = dict(self.log.names)
        for index, step in enumerate(self.log.steps[: self.prefix]):
            if isinstance(step, Entries) and index in chosen:
                for folder, name, inode in step.changes:
                    if inode is None:
                        entries.pop((folder, name), None)
                    else:
                        entries[folder, name] = inode
        below: dict[int, list[tuple[str, int]]] = {}
        for (folder, name), inode in sorted(entries.items()):
            below.setdefault(folder, []).append((name, inode))
        tree: Tree = {}

        def walk(folder: int, path: str) -> None:
            for name, inode in below.get(folder, ()):
                where = f"{path}{name}"
                if inode in self.log.folders:
                    assert where.count("/") < 30, "a folder below itself"
                    tree[where] = None
                    walk(inode, f"{where}/")
                else:
                    tree[where] = contents.get(inode, self.base.get(inode, EMPTY))

        walk(ROOT, "")
        return tree

    def _closed(self, chosen: set[int]) -> set[int]:
        """With the steps that the chosen ones come with."""
        closed, todo = set(chosen), list(chosen)
        while todo:
            for index in self.needs[todo.pop()] - closed:
                closed.add(index)
                todo.append(index)
        return closed

    def torn(self, inode: int, dice: random.Random) -> str:
        """One of the things that writes since the last fsync may have left."""
        store = self.log.store
        old, new = (store.contents[k] for k in (self.base.get(inode, EMPTY), self.written[inode]))
        kind = dice.choice(("old", "new", "short", "zeros", "pages"))
        if kind == "old":
            return self.base.get(inode, EMPTY)
        if kind == "new":
            return self.written[inode]
        if kind == "short":
            return store.put(new[: dice.randrange(len(new) + 1)])
        if kind == "zeros":
            return store.put(bytes(len(new)))
        mixed = bytearray(new)
        for start in range(0, len(new), PAGE):
            end = min(start + PAGE, len(new))
            if dice.random() < 0.5:
                mixed[start:end] = old[start:end].ljust(end - start, b"\0")
        return store.put(bytes(mixed))


def crashes(log: Log, top: str, samples: int, seed: int = 1, first: int = 0) -> Iterator[Crash]:
    """States after every prefix from ``first`` on: nothing unsynced kept, all of it, all but one step on names, only
    one, and ``samples`` random mixtures with torn files.  Only what lies below ``top`` is varied.
    """
    matters = _matters(log, top)
    for prefix in range(first, len(log.steps) + 1):
        state = _Open(log, prefix, matters)
        dice = random.Random(f"{seed} {prefix}")
        everything = dict(state.written)
        yield Crash(prefix, "only what was synced", state.tree(set(), {}))
        yield Crash(prefix, "everything", state.tree(set(state.names), everything))
        for index in state.names[-8:]:
            yield Crash(prefix, f"all but step {index}", state.tree(set(state.names) - {index}, everything))
            yield Crash(prefix, f"only step {index}", state.tree({index}, {}))
        yield Crash(prefix, "all names, no content", state.tree(set(state.names), {}))
        for sample in range(samples if state.names or state.files else 0):
            names = {i for i in state.names if dice.random() < 0.5}
            contents = {inode: state.torn(inode, dice) for inode in state.files}
            yield Crash(prefix, f"mixture {sample}", state.tree(names, contents))


def write(tree: Tree, store: Store, below: str, folder: Path, pool: Path) -> None:
    """Make the part of a state that lies below the path ``below``.

    Files are links to ``pool``, where each content is written once: nothing looked at here writes into a file.
    """
    folder.mkdir()
    for path, key in tree.items():
        if not path.startswith(f"{below}/"):
            continue
        target = folder / path.removeprefix(f"{below}/")
        if key is None:
            target.mkdir()
            continue
        content = pool / key
        if not content.exists():
            content.write_bytes(store.contents[key])
        os.link(content, target)
