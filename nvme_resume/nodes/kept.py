"""Checkpoints that nothing may remove: a node that is lost must not take the last whole one with it.

Each node knows of its own links what has been brought.  At the start of a save the nodes tell each other; the newest
checkpoint of a folder that all links have brought stays until a newer one is known to be everywhere, whatever
``keep_last`` says.  Before the first one is, that is the one that former runs left on most nodes.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nvme_resume import layout
from nvme_resume.config import Options
from nvme_resume.errors import NvmeResumeError
from nvme_resume.nodes.channel import Pair
from nvme_resume.nodes.inventory import Held
from nvme_resume.storage import catalog, records
from nvme_resume.storage import disk as seam
from nvme_resume.storage.catalog import Saved

_MOST = 4  # checkpoints of this run, in one folder, that may turn out to be everywhere
_MOST_LOOKED_AT = 8  # of former runs


@dataclass
class _Copies:
    """What became of one checkpoint of this run, as far as this rank knows."""

    where: Path
    left: set[Pair]  # links that have not brought it
    give_back: Callable[[], None]


class Former(NamedTuple):
    """A checkpoint of a former run, as one rank sees it; plain data."""

    inside: str  # the Trainer's folder it lies in; "": none
    held: Held

    @property
    def key(self) -> tuple[str, str, str]:
        """Which one it is, on any node."""
        return self.inside, *self.held.key


def where(save_dir: Path, *, loose: bool) -> Path:
    """The folder in which older ones are removed; ``loose``: ``save_dir`` is one of several there (a Trainer's)."""
    return save_dir.parent if loose else save_dir


def former(folder: Path, *, loose: bool) -> list[Former]:
    """The last checkpoints that lie in ``folder``, a result of ``where``.

    A rank's record comes last, so where it is the part is taken to be: with many ranks, reading them all takes long.
    """
    places = {"": folder}
    if loose:
        inside_it = sorted((p for p in folder.iterdir() if p.is_dir()), key=_age)
        places = {p.name: p for p in inside_it[-_MOST_LOOKED_AT:]}
    found = []
    for inside, place in places.items():
        for tag in catalog.tags(place)[-_MOST_LOOKED_AT:]:
            with contextlib.suppress(NvmeResumeError, OSError):  # one that is damaged keeps nothing
                head = records.read_manifest(place / tag)
                there = set(seam.current().names(place / tag / layout.RECORDS))
                ranks = [r for r in range(head.world_size) if Path(layout.rank_record(r)).name in there]
                held = Held(tag, head.checkpoint_id, head.global_steps, head.world_size, [], ranks, [])
                found.append(Former(inside, held))
    return found


def _age(path: Path) -> int:
    """To sort by; 0 where it was removed meanwhile."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


def safest(seen: Sequence[Sequence[Former]], options: Options, nodes: int) -> Former | None:
    """The newest of those that lie on as many nodes as ``options`` want, else of those that come closest to that.

    ``seen``: by publisher, the main node's first.  None where there is no whole one.
    """
    every = {one.key: one for node in seen for one in node}
    copies = Counter((one.key, rank) for node in seen for one in node for rank in one.held.ranks)
    on_main = {(one.key, rank) for one in seen[0] for rank in one.held.ranks} if seen else set()
    wanted = 1 + min(options.replicas, nodes - 1)

    def safety(one: Former) -> tuple[bool, int, int]:
        ranks = range(one.held.world_size)
        everywhere = min(wanted, *(copies[one.key, rank] for rank in ranks))
        main = all((one.key, rank) in on_main for rank in ranks)
        enough = everywhere == wanted and (main or options.gather is None)
        return enough, everywhere + main, one.held.step

    whole = [one for one in every.values() if all(copies[one.key, r] for r in range(one.held.world_size))]
    return max(whole, key=safety, default=None)


class Kept:
    """Those of one rank.  Checkpoints of this run go by a number, the same on all ranks."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()  # links have threads of their own
        self._copies: dict[int, _Copies] = {}
        self._newest: dict[Path, int] = {}  # by folder: that is known to be everywhere
        self._former: dict[Path, Callable[[], None]] = {}

    def keep_former(self, where: Path, checkpoint: Path) -> None:
        """One of a former run stays, until one of this run is everywhere."""
        if where not in self._newest and where not in self._former:
            self._former[where] = catalog.use(checkpoint)

    def begin(self, number: int, saved: Saved, where: Path, links: Iterable[Pair]) -> None:
        """It is about to be brought."""
        with self._mutex:
            self._copies[number] = _Copies(where, set(links), catalog.use(saved.folder))
            newest = self._newest.get(where, 0)
            candidates = [
                n for n, copies in sorted(self._copies.items()) if copies.where == where and n > newest
            ]
            for old in candidates[:-_MOST]:
                self._copies.pop(old).give_back()

    def settle(self, number: int | None, link: Pair) -> None:
        """That link has brought it; None: one of a former run.  From any thread."""
        with self._mutex:
            if number in self._copies:
                self._copies[number].left.discard(link)

    def brought(self) -> list[int]:
        """The last ones that all links of this rank have brought."""
        with self._mutex:
            return [number for number, copies in self._copies.items() if not copies.left]

    def agree(self, brought: Sequence[list[int] | None]) -> None:
        """Give back what a newer one has made dispensable; ``brought``: by rank, None where it has no links."""
        of_nodes = [set(numbers) for numbers in brought if numbers is not None]
        everywhere = set.intersection(*of_nodes) if of_nodes else set()
        with self._mutex:
            for number in sorted(everywhere & self._copies.keys()):
                self._newest[self._copies[number].where] = number
            for old, copies in list(self._copies.items()):
                if old < self._newest.get(copies.where, 0):
                    self._copies.pop(old).give_back()
            for folder in self._newest.keys() & self._former.keys():
                self._former.pop(folder)()
