"""Which ranks see the same folder?  Found out by looking, not believed from flags.

``use_node_local_storage``, ``save_on_each_node`` and LOCAL_RANK are what somebody wrote into a configuration or a
launcher; a folder that two nodes share and both publish into, or that one node cannot see, is what loses checkpoints.
So a file of a fresh name is put down and every rank looks whether it is there.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nvme_resume import layout
from nvme_resume.errors import StorageError
from nvme_resume.peers import Peers
from nvme_resume.storage import disk as seam

_VISIBLE_SECONDS = 3.0  # network file systems show new entries late (NFS: acregmin is 3 s)
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Place:
    """One folder as the ranks that see it know it."""

    ranks: tuple[int, ...]  # who see it; the first is the publisher
    publisher: bool  # is it this rank?
    all_places: tuple[tuple[int, ...], ...]  # the ranks of every place, in the order of their publishers

    @property
    def alone(self) -> bool:
        """Do all ranks see the same folder?"""
        return len(self.all_places) == 1


class Places:
    """What is known about the folders that a job saves to: found out once for each file system."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._known: dict[int, Place] = {}  # by file system
        self._devices: dict[Path, int] = {}

    def known(self, folder: Path) -> bool:
        """Has this rank's file system been looked at?  OSError."""
        self._devices[folder] = seam.current().device(folder)
        return self._devices[folder] in self._known

    def of(self, folder: Path, known: Sequence[bool]) -> Place:
        """The place of an existing folder.  Collective; ``known``: what every rank's ``known`` said just now.

        Raises PeerError, and StorageError on every rank where one cannot write there.
        """
        device = self._devices[folder]
        if all(known):
            return self._known[device]
        place = self._look(folder)
        self._known[device] = place
        return place

    def make(self, folder: Path, during: str) -> Place:
        """The place of a folder, which is made where it is missing.  Collective; raises what ``of`` does."""

        def known() -> bool:
            seam.current().make_folder(folder)
            return self.known(folder)

        return self.of(folder, self._peers.run(known, during))

    def _look(self, folder: Path) -> Place:
        """Rounds, until every rank has joined the lowest rank whose file it sees."""
        peers = self._peers
        homes: list[int | None] = [None] * peers.world_size
        while None in homes:
            first = homes.index(None)
            # Who puts a file down?  The lowest rank without a place, and whoever says it is the first of its node.
            chosen = homes[peers.rank] is None and (peers.rank == first or peers.local_rank == 0)
            seen = self._round(folder, chosen)
            homes = [s if h is None else h for h, s in zip(homes, seen, strict=True)]
            if homes[first] is None:
                raise StorageError(
                    "a file that was just written cannot be seen",
                    rank=first,
                    path=str(folder),
                    hint="look at the file system there",
                )
        places: dict[int | None, list[int]] = {}
        for rank, home in enumerate(homes):
            places.setdefault(home, []).append(rank)
        own = next(tuple(ranks) for ranks in places.values() if peers.rank in ranks)
        return Place(own, own[0] == peers.rank, tuple(tuple(ranks) for ranks in places.values()))

    def _round(self, folder: Path, chosen: bool) -> list[int | None]:
        """The chosen ranks put a file down; for each rank, the lowest whose file it sees."""
        path = folder / f"{layout.STAGING_PREFIX}place.{uuid.uuid4().hex}"

        def put() -> str | None:
            if chosen:
                seam.current().write(path, b"", sync=False)
            return path.name if chosen else None

        try:
            names = self._peers.run(put, f"look at {folder}")
            return self._peers.run(lambda: _lowest_seen(folder, names), f"look at {folder}")
        finally:
            if chosen:
                with suppress(OSError):
                    seam.current().remove_tree(path)


def _lowest_seen(folder: Path, names: Sequence[str | None]) -> int | None:
    """The lowest rank whose file is there; waits a little for those that are not."""
    deadline = time.monotonic() + _VISIBLE_SECONDS
    lowest = next(rank for rank, name in enumerate(names) if name is not None)
    while True:
        there = set(seam.current().names(folder))
        seen = [rank for rank, name in enumerate(names) if name in there]
        if (seen and seen[0] == lowest) or time.monotonic() > deadline:
            return seen[0] if seen else None
        time.sleep(_POLL_SECONDS)
