"""Before a load: a node that lacks what its ranks need gets it from whoever has it, and only that.

A disk may have been replaced, a rank may run on another node than before, a folder may have been copied to one node
only.  The ranks tell each other what they see, agree on one checkpoint that all of them together have, and the parts go
from node to node, each at most once.  Where every rank sees what it needs nothing happens but one exchange.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nvme_resume import layout, logs, manifest
from nvme_resume.config import Options
from nvme_resume.errors import CorruptError, NoCheckpointError, NvmeResumeError
from nvme_resume.manifest import Manifest
from nvme_resume.nodes import inventory, session
from nvme_resume.nodes.channel import Channel, Meeting
from nvme_resume.nodes.inventory import Delivery, Held
from nvme_resume.nodes.session import Errand
from nvme_resume.peers import Peers
from nvme_resume.places import Place, Places
from nvme_resume.storage import catalog, commit, locks, records
from nvme_resume.storage import disk as seam
from nvme_resume.storage.background import Background, Gate, over
from nvme_resume.storage.intake import Intake
from nvme_resume.storage.limit import Limit

log = logs.logger
_PROGRESS_AFTER_SECONDS = 2.0
_LOOK = "look at the checkpoint folder"


def supply(
    folder: Path,
    tag: str | None,
    peers: Peers,
    places: Places,
    options: Options,
    *,
    loose: bool = False,
    beside: Sequence[str] = (),
    doubted: bool = False,
) -> bool:
    """See to it that every rank sees in the save folder ``folder`` what it needs of ``tag``, if anybody has it.

    ``tag`` None: of the checkpoint that ``latest`` names, or the newest that all have together; one that turns out
    damaged is skipped.  ``loose``: the files beside the tag folder as well, and ``folder`` itself may be missing
    somewhere; ``beside``: those that this rank misses.  ``doubted``: sizes are not believed, every byte is read.
    Collective; True when anything came.

    Raises the same error on every rank: NoCheckpointError when nobody has a part of it, CorruptError when nobody has a
    good one, LockedError, NoSpaceError, PeerError, StorageError; what had arrived stays for the next time.
    """
    if peers.alone:
        return False
    share = catalog.read_by(peers.rank, peers.world_size)
    said = peers.run(lambda: (_glance(folder, tag, share), list(beside)), _LOOK)
    seen, wanted = [s for s, _ in said], [names for _, names in said]
    if not (doubted or any(wanted)) and all(s is not None and s == seen[0] and s[2] for s in seen):
        return False
    named = {s[0] for s in seen if s is not None}
    job = _Supply(folder, peers, places, options, loose=loose)
    skipped: dict[tuple[str, str], NvmeResumeError] = {}
    if doubted and job.place().alone:
        return False
    read = tag if doubted else None  # the tag whose bytes are compared
    while True:
        seen_by = job.look(tag, read)
        if tag is None and not any(wanted) and all(by_rank == seen_by[0] for by_rank in seen_by):
            return False  # one folder that all share, or as good as that
        try:
            chosen = inventory.choose(seen_by, tag, named, str(folder), skipped)
        except NoCheckpointError:
            for first in skipped.values():
                raise first from None  # that is why
            raise
        if chosen is None:
            return False
        deliveries: list[Delivery] = []
        if inventory.is_missed(seen_by, chosen):
            deliveries = inventory.plan(seen_by, chosen, job.place().all_places)
        if any(wanted):
            deliveries += job.beside(chosen, wanted, deliveries)
        if not deliveries:
            return False
        try:
            job.deliver(chosen, deliveries, doubted=read == chosen.tag)
        except (CorruptError, NoCheckpointError) as error:
            if isinstance(error, CorruptError) and read != chosen.tag:
                read = chosen.tag  # who has a good one?
            elif tag is not None:
                raise
            else:
                if peers.rank == 0:
                    log.warning("%s is skipped: %s", folder / chosen.tag, error)
                skipped[chosen.key] = error
        else:
            return True


def _glance(folder: Path, tag: str | None, share: catalog.Share) -> tuple[str, str, bool] | None:
    """Tag, id and soundness of the checkpoint that a load means, as far as this rank's share tells."""
    entry = catalog.look(folder, tag, share) if tag is not None else catalog.latest(folder, share)
    return None if entry is None else (entry.tag, entry.checkpoint_id, entry.problem is None)


class _Supply:
    """One folder and the ranks that look at it."""

    def __init__(self, folder: Path, peers: Peers, places: Places, options: Options, *, loose: bool) -> None:
        self._folder = folder
        self._peers = peers
        self._places = places
        self._options = options
        self._loose = loose
        self._owned = folder.parent if loose else folder  # what is written to

    def place(self) -> Place:
        """Who shares the folder, which is made where it is missing.  Collective."""
        return self._places.make(self._owned, _LOOK)

    def look(self, tag: str | None, read: str | None) -> list[list[Held]]:
        """What each rank sees of the tag, or of all.  Of the tag ``read`` every byte is compared.  Collective.

        Every node has the same manifest of a checkpoint: who has a good one has given it to the others then.
        """
        seen = self._look(tag, read)
        lost = inventory.without_manifest(seen)
        if lost:
            self._give_manifests(lost, seen[self._peers.rank])
            seen = self._look(tag, read)
        return seen

    def _give_manifests(self, lost: Mapping[tuple[str, str], int], mine: Sequence[Held]) -> None:
        folder, peers = self._folder, self._peers
        place = self.place()

        def give() -> list[str]:
            tags = [tag for (tag, _), rank in lost.items() if rank == peers.rank]
            return [manifest.encode(records.read_manifest(folder / tag)).decode() for tag in tags]

        given = peers.run(give, _LOOK)

        def take() -> None:
            if not place.publisher:
                return
            damaged = {held.key for held in mine if not held.world_size}
            for head in (
                manifest.decode(Manifest, text.encode(), _LOOK) for texts in given for text in texts
            ):
                if (head.tag, head.checkpoint_id) not in damaged:
                    continue
                try:
                    with self._lock(), Intake(folder, head, "the other nodes"):
                        log.info("%s has its manifest again", folder / head.tag)
                except (NvmeResumeError, OSError) as error:  # then it is none here, and another one may do
                    log.warning("the manifest of %s cannot be given back: %s", folder / head.tag, error)

        peers.run(take, "return of a manifest")

    def _lock(self) -> contextlib.closing[locks.Lock]:
        """The lock alone: what an earlier try left in the folder is gone on with."""
        return contextlib.closing(locks.take_save_folder(self._owned, hint="end that job first"))

    def _look(self, tag: str | None, read: str | None) -> list[list[Held]]:
        folder, peers, options = self._folder, self._peers, self._options
        tags = None if tag is None else [tag]
        if read is None:
            return peers.run(lambda: inventory.take(folder, tags, None, range, options), _LOOK)
        place = self.place()
        share = catalog.share_of(place.ranks.index(peers.rank), len(place.ranks))
        found: list[list[Held]] = []
        with _threads(1) as (work,):
            take = partial(inventory.take, folder, tags, read, share, options)
            task = work.submit(f"look at {folder / read}", lambda: found.append(take()), 0.0, awaited=True)
            peers.together(partial(over, [task]), _LOOK)
        seen = peers.run(lambda: found[0], _LOOK)
        whole = {ranks: inventory.merged([seen[rank] for rank in ranks]) for ranks in place.all_places}
        return [next(w for ranks, w in whole.items() if rank in ranks) for rank in range(len(seen))]

    def beside(
        self, chosen: Held, wanted: Sequence[Sequence[str]], deliveries: Sequence[Delivery]
    ) -> list[Delivery]:
        """For files beside the tag folder alone, from whoever has most of them.  Collective."""
        there = self._peers.run(lambda: catalog.beside(self._folder, chosen.tag), _LOOK)
        places = self.place().all_places
        found = []
        for ranks in places:
            missing = {name for rank in ranks for name in wanted[rank]} - set(there[ranks[0]])
            given = {p[0]: len(missing & set(there[p[0]])) for p in places if p != ranks}
            source = max(given, key=lambda p: given[p], default=ranks[0])
            if given.get(source) and not any((d.source, d.target) == (source, ranks[0]) for d in deliveries):
                found.append(Delivery(source, ranks[0], ()))
        return found

    def deliver(self, chosen: Held, deliveries: Sequence[Delivery], *, doubted: bool) -> None:
        """All at once, each in a thread of its own on both ends.  Collective."""
        start, peers, options = time.monotonic(), self._peers, self._options
        folder = self._folder / chosen.tag
        meeting = Meeting.call(peers)
        if peers.rank == 0:
            for d in deliveries:
                log.info(
                    "%s: rank %d on %s gets %s from rank %d on %s",
                    folder, *meeting.nodes[d.target],
                    f"the files of ranks {list(d.ranks)}" if d.ranks else "files beside it",
                    *meeting.nodes[d.source],
                )  # fmt: skip
        mine = [d for d in deliveries if peers.rank in (d.source, d.target)]
        receives = any(d.target == peers.rank for d in mine)
        with contextlib.ExitStack() as undo:
            channels: list[Channel] = []

            def own() -> None:
                if receives:
                    undo.enter_context(self._lock())

            def connect() -> None:
                for d in mine:
                    channels.append(
                        Channel(meeting, (d.source, d.target), peers.rank, options.timeout_seconds)
                    )

            # Apart: a rank that is refused must not leave another waiting for its connection.
            peers.run(own, "lock of the checkpoint folder")
            peers.run(connect, "connection of the nodes")
            limit = Limit(options.network_limit_mib)
            bar: Any = tqdm(
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                desc=f"files of {chosen.tag} from other nodes",
                leave=False,
                delay=_PROGRESS_AFTER_SECONDS,
                disable=None if receives else True,
            )
            undo.callback(bar.close)
            works = undo.enter_context(_threads(len(mine)))
            where = self._landing(chosen) if receives else self._folder
            heads: list[Manifest] = []
            tasks = []
            for d, channel, work in zip(mine, channels, works, strict=True):
                errand = Errand(
                    where, chosen.tag, chosen.checkpoint_id, d.ranks, self._loose, new=True, doubted=doubted
                )
                go: Callable[[], object]
                if d.source == peers.rank:
                    errand = replace(errand, save_dir=self._folder)
                    go = partial(session.serve, channel, errand, limit, work.gate, options)
                else:
                    go = partial(_fetch, channel, errand, options, work.gate, bar.update, heads)
                tasks.append(work.submit(f"{chosen.tag} from node to node", go, 0.0, awaited=True))
            # Several nodes may have given their parts of one checkpoint: it appears when all of them are there.
            peers.together(partial(over, tasks), f"transfer of {chosen.tag} between nodes")
            peers.run(
                lambda: self._publish(chosen, where, heads) if receives else None, f"commit of {chosen.tag}"
            )
        if peers.rank == 0:
            log.info("%s is on all nodes after %.2f s", folder, time.monotonic() - start)

    def _landing(self, chosen: Held) -> Path:
        """Where the tag folder is to appear: a folder with loose files that is not there at all appears whole."""
        if not self._loose or self._folder.is_dir():
            return self._folder
        return (
            self._folder.with_name(layout.staging(self._folder.name, chosen.checkpoint_id))
            / self._folder.name
        )

    def _publish(self, chosen: Held, where: Path, heads: Sequence[Manifest]) -> None:
        """What had no name yet gets it."""
        folder, disk = self._folder, seam.current()
        latest = where != folder or catalog.deserves_latest(folder, chosen.step)
        with Intake(where, heads[0], "the other nodes") as inbox:
            inbox.publish(latest=latest)
        if where != folder:
            commit.move_in(where, folder, chosen.checkpoint_id)
            disk.remove_tree(where.parent)


def _fetch(
    channel: Channel,
    errand: Errand,
    options: Options,
    gate: Gate,
    progress: session.Progress,
    heads: list[Manifest],
) -> None:
    head = session.fetch(channel, errand, options, gate, progress).head
    assert head is not None
    heads.append(head)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[list[Background]]:
    works = [Background() for _ in range(count)]
    try:
        yield works
    finally:
        for work in works:
            work.close()
