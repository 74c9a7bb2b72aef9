"""Checkpoints that nothing may remove: a node that is lost must not take the last whole one with it.

Each node knows of its own links what has been brought.  At the start of a save the nodes tell each other; the newest
checkpoint that all links have brought stays until a newer one is known to be everywhere, whatever ``keep_last`` says.
Before the first one is, so do all that former runs left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nvme_resume.nodes.channel import Pair
from nvme_resume.storage import catalog
from nvme_resume.storage.catalog import Saved

_MOST = 4  # checkpoints of this run that may turn out to be everywhere


@dataclass
class _Copies:
    """What became of one checkpoint of this run, as far as this rank knows."""

    left: set[Pair]  # links that have not brought it
    give_back: Callable[[], None]


class Kept:
    """Those of one rank.  Checkpoints of this run go by a number, the same on all ranks."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()  # links have threads of their own
        self._copies: dict[int, _Copies] = {}
        self._newest = 0  # that is known to be everywhere; 0: none of this run
        self._looked_at: set[Path] = set()
        self._of_former_runs: list[Callable[[], None]] = []

    def begin(self, number: int, saved: Saved, links: Iterable[Pair], *, loose: bool) -> None:
        """It is about to be brought; ``loose``: it lies inside a Trainer's folder, beside others of that kind."""
        where = saved.save_dir.parent if loose else saved.save_dir
        if not self._newest and where not in self._looked_at:
            self._looked_at.add(where)
            folders = sorted(where.iterdir()) if loose else [where]
            tags = [folder / tag for folder in folders for tag in catalog.tags(folder)]
            self._of_former_runs += [catalog.use(tag) for tag in tags if tag != saved.folder]
        with self._mutex:
            self._copies[number] = _Copies(set(links), catalog.use(saved.folder))
            for old in [n for n in sorted(self._copies) if n > self._newest][:-_MOST]:
                self._copies.pop(old).give_back()

    def settle(self, number: int, link: Pair) -> None:
        """That link has brought it.  From any thread."""
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
        self._newest = max(set.intersection(*of_nodes) if of_nodes else (), default=self._newest)
        with self._mutex:
            for old in [number for number in self._copies if number < self._newest]:
                self._copies.pop(old).give_back()
        while self._newest and self._of_former_runs:
            self._of_former_runs.pop()()
