"""Before a load: a node that lacks what its ranks need gets it from whoever has it, and only that.

A disk may have been replaced, a rank may run on another node than before, a folder may have been copied to one node
only.  The ranks tell each other what they see, agree on one checkpoint that all of them together have, and the parts go
from node to node, each at most once.  Where every rank sees what it needs nothing happens but one exchange.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from nvme_resume import layout, logs
from nvme_resume.config import Options
from nvme_resume.errors import NoCheckpointError, NvmeResumeError
from nvme_resume.nodes import session
from nvme_resume.nodes.channel import Channel, Meeting
from nvme_resume.nodes.session import Errand
from nvme_resume.peers import Peers
from nvme_resume.places import Places
from nvme_resume.storage import catalog, commit, locks, records, verify
from nvme_resume.storage import disk as seam
from nvme_resume.storage.background import Background, over
from nvme_resume.storage.limit import Limit

log = logs.logger
_PROGRESS_AFTER_SECONDS = 2.0


class Held(NamedTuple):
    """What one rank sees of one checkpoint; plain data."""

    tag: str
    checkpoint_id: str
    step: int
    world_size: int
    hosts: list[str]  # by saved rank
    ranks: list[int]  # saved ranks whose files are all there

    @property
    def key(self) -> tuple[str, str]:
        """Which checkpoint it is, wherever it lies."""
        return self.tag, self.checkpoint_id


class Delivery(NamedTuple):
    """From one publisher to another, for good."""

    source: int
    target: int
    ranks: tuple[int, ...]


def supply(
    folder: Path, tag: str | None, peers: Peers, places: Places, options: Options, *, loose: bool = False
) -> None:
    """See to it that every rank sees in the save folder ``folder`` what it needs of ``tag``, if anybody has it.

    ``tag`` None: of the checkpoint that ``latest`` names, or the newest that all have together.  ``loose``: the files
    beside the tag folder as well, and ``folder`` itself may be missing somewhere.  Collective.

    Raises the same error on every rank: NoCheckpointError when nobody has a part of the ``tag`` that was asked for,
    LockedError, NoSpaceError, PeerError, StorageError, CorruptError; what had arrived stays for the next time.
    """
    if peers.alone:
        return
    share = catalog.read_by(peers.rank, peers.world_size)
    seen = peers.run(lambda: _glance(folder, tag, share), "look at the checkpoint folder")
    if all(s is not None and s == seen[0] and s[2] for s in seen):
        return
    wanted = None if tag is None else [tag]
    inventories = peers.run(lambda: _inventory(folder, wanted), "look at the checkpoint folder")
    named = {s[0] for s in seen if s is not None}
    chosen = _choose(inventories, tag, named, str(folder))
    if chosen is None or not any(_lacks(h, chosen, r, len(inventories)) for r, h in enumerate(inventories)):
        return
    place = places.make(folder.parent if loose else folder, "look at the checkpoint folder")
    deliveries = plan(inventories, chosen, place.all_places)
    _deliver(folder, chosen, deliveries, peers, options, loose=loose)


def _glance(folder: Path, tag: str | None, share: catalog.Share) -> tuple[str, str, bool] | None:
    """Tag, id and soundness of the checkpoint that a load means, as far as this rank's share tells."""
    entry = catalog.look(folder, tag, share) if tag is not None else catalog.latest(folder, share)
    return None if entry is None else (entry.tag, entry.checkpoint_id, entry.problem is None)


def _inventory(folder: Path, tags: Iterable[str] | None) -> list[Held]:
    """All checkpoints of ours in the folder, and the ranks whose files are there."""
    found = []
    for tag in catalog.tags(folder) if tags is None else tags:
        try:
            if not (folder / tag).is_dir() or not records.has_manifest(folder / tag):
                continue
            head = records.read_manifest(folder / tag)
        except NvmeResumeError:
            continue  # whoever chooses says what is wrong with it
        if head.tag != tag:
            continue
        ranks = []
        for rank in range(head.world_size):
            if not (folder / tag / layout.rank_record(rank)).is_file():
                continue
            with contextlib.suppress(NvmeResumeError, OSError):
                record, _, _ = records.read_rank(folder / tag, head, rank)
                verify.structure(folder / tag, record.files, rank=rank, tag=tag)
                ranks.append(rank)
        hosts = [entry.host for entry in head.ranks]
        found.append(Held(tag, head.checkpoint_id, head.global_steps, head.world_size, hosts, ranks))
    return found


def _choose(
    inventories: Sequence[Sequence[Held]], tag: str | None, named: Collection[str], where: str
) -> Held | None:
    """The checkpoint to bring about: the one that is named, else the newest that all have together."""
    every: dict[tuple[str, str], Held] = {}
    together: dict[tuple[str, str], set[int]] = {}
    for held in (h for rank in inventories for h in rank):
        every.setdefault(held.key, held)
        together.setdefault(held.key, set()).update(held.ranks)
    whole = [h for key, h in every.items() if together[key] == set(range(h.world_size))]
    if tag is not None and every and not whole:
        held = next(iter(every.values()))
        missing = sorted(set(range(held.world_size)) - together[held.key])
        hosts = sorted({held.hosts[rank] for rank in missing})
        raise NoCheckpointError(
            f"no node has the files of ranks {missing}",
            tag=tag,
            path=where,
            expected=f"those that {', '.join(hosts)} saved",
            found=f"ranks {sorted(together[held.key])}",
            hint=f"bring the disk of {', '.join(hosts)}, or name another tag",
        )
    return max(whole, key=lambda h: (h.tag in named, h.step), default=None)


def _holds(inventory: Sequence[Held], chosen: Held) -> set[int]:
    return {r for held in inventory if held.key == chosen.key for r in held.ranks}


def _lacks(inventory: Sequence[Held], chosen: Held, rank: int, world_size: int) -> bool:
    return not set(catalog.read_by(rank, world_size)(chosen.world_size)) <= _holds(inventory, chosen)


def plan(
    inventories: Sequence[Sequence[Held]], chosen: Held, places: Sequence[tuple[int, ...]]
) -> list[Delivery]:
    """What goes where: each place gets what its ranks need and it lacks, from the places that have it, in turns."""
    world = len(inventories)
    holders = {ranks[0]: _holds(inventories[ranks[0]], chosen) for ranks in places}
    given = dict.fromkeys(holders, 0)
    found: dict[tuple[int, int], list[int]] = {}
    for ranks in places:
        target = ranks[0]
        wanted = (
            set().union(*(set(catalog.read_by(rank, world)(chosen.world_size)) for rank in ranks))
            - holders[target]
        )
        for rank in sorted(wanted):
            source = min((p for p in holders if rank in holders[p]), key=lambda p: (given[p], p))
            given[source] += 1
            found.setdefault((source, target), []).append(rank)
    return [Delivery(source, target, tuple(ranks)) for (source, target), ranks in sorted(found.items())]


def _deliver(
    folder: Path,
    chosen: Held,
    deliveries: Sequence[Delivery],
    peers: Peers,
    options: Options,
    *,
    loose: bool,
) -> None:
    """All at once, each in a thread of its own on both ends."""
    start = time.monotonic()
    meeting = Meeting.call(peers)
    if peers.rank == 0:
        for d in deliveries:
            log.info(
                "%s: rank %d on %s gets the files of ranks %s from rank %d on %s",
                folder / chosen.tag,
                *meeting.nodes[d.target],
                list(d.ranks),
                *meeting.nodes[d.source],
            )
    mine = [d for d in deliveries if peers.rank in (d.source, d.target)]
    with contextlib.ExitStack() as undo:
        channels: list[Channel] = []

        def own() -> None:
            if any(d.target == peers.rank for d in deliveries):
                # The lock alone: what an earlier try left here is gone on with.
                lock = locks.take_save_folder(folder.parent if loose else folder, hint="end that job first")
                undo.callback(lock.close)

        def connect() -> None:
            for d in mine:
                channels.append(Channel(meeting, (d.source, d.target), peers.rank, options.timeout_seconds))

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
            disable=None if any(d.target == peers.rank for d in mine) else True,
        )
        undo.callback(bar.close)
        works = [Background() for _ in mine]
        for work in works:
            undo.callback(work.close)
        tasks = []
        for d, channel, work in zip(mine, channels, works, strict=True):

            def go(d: Delivery = d, channel: Channel = channel, work: Background = work) -> None:
                if d.source == peers.rank:
                    session.serve(channel, _errand(folder, chosen, d, loose=loose), limit, work.gate, options)
                else:
                    _take(folder, chosen, d, channel, work, options, bar, loose=loose)

            tasks.append(work.submit(f"{chosen.tag} from node to node", go, 0.0, awaited=True))

        peers.together(partial(over, tasks), f"transfer of {chosen.tag} between nodes")
    if peers.rank == 0:
        log.info("%s is on all nodes after %.2f s", folder / chosen.tag, time.monotonic() - start)


def _errand(folder: Path, chosen: Held, d: Delivery, *, loose: bool) -> Errand:
    return Errand(folder, chosen.tag, chosen.checkpoint_id, d.ranks, loose)


def _take(
    folder: Path,
    chosen: Held,
    d: Delivery,
    channel: Channel,
    work: Background,
    options: Options,
    bar: Any,
    *,
    loose: bool,
) -> None:
    """On the receiving side; a folder with loose files that is not there at all appears whole."""
    latest = catalog.deserves_latest(folder, chosen.step)
    if not loose or folder.is_dir():
        errand = _errand(folder, chosen, d, loose=loose)
        session.fetch(channel, errand, options, work.gate, bar.update, latest=latest)
        return
    staging = folder.with_name(layout.staging(folder.name, chosen.checkpoint_id))
    inside = staging / folder.name
    catalog.under_way.add(staging)
    try:
        seam.current().make_folder(inside)
        errand = _errand(inside, chosen, d, loose=loose)
        session.fetch(channel, errand, options, work.gate, bar.update, latest=True)
        commit.move_in(inside, folder, chosen.checkpoint_id)
        seam.current().remove_tree(staging)
    finally:
        catalog.under_way.discard(staging)
