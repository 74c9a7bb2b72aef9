"""After a commit: every node's part goes where it is to be kept as well, in the background.

``"gather": "main"`` brings all parts to the folder of the node with rank 0, ``"replicas": n`` those of each node to the
n nodes after it.  Each pair of nodes has a link: a channel, a thread on both ends, and a list of what is owed.  A link
that fails stays quiet until the next save makes a new channel, and then brings what it owes; what a former run owed is
brought with the first save of the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from nvme_resume import errors, layout, logs
from nvme_resume.config import Options
from nvme_resume.errors import NvmeResumeError, PeerError, ReplacedError
from nvme_resume.nodes import kept, session
from nvme_resume.nodes.channel import Channel, Meeting, Node, Pair
from nvme_resume.nodes.kept import Former, Kept
from nvme_resume.nodes.messages import Turn
from nvme_resume.nodes.session import Errand
from nvme_resume.peers import Peers
from nvme_resume.places import Place
from nvme_resume.storage import catalog, records
from nvme_resume.storage.background import Background, Cancelled, Gate, Task, behind, over
from nvme_resume.storage.catalog import Saved
from nvme_resume.storage.limit import Limit

log = logs.logger
_REMEMBERED = 8  # checkpoints of this run
_FORMER = 2  # checkpoints that were not brought, or not by an earlier run, and are tried (again)


def pairs(place: Place, gather: bool, replicas: int) -> list[Pair]:
    """Who sends its part to whom, in an order that is the same everywhere."""
    publishers = [ranks[0] for ranks in place.all_places]
    count = len(publishers)
    found = {(p, publishers[0]) for p in publishers[1:]} if gather else set()
    for distance in range(1, min(replicas, count - 1) + 1):
        found |= {(p, publishers[(i + distance) % count]) for i, p in enumerate(publishers)}
    return sorted(found)


@dataclass
class _Link:
    """One end of a pair."""

    pair: Pair
    sends: bool
    there: Node
    ranks: tuple[int, ...]  # whose parts are brought
    channel: Channel | None
    work: Background
    errands: dict[int, Errand] = field(default_factory=dict)  # the last ones, by number
    owed: set[int] = field(default_factory=set)  # those that have not been brought
    fresh: bool = True  # nothing of this run was brought yet
    tasks: list[Task] = field(default_factory=list)


class Links:
    """All that this rank brings to others and gets from them.  Only publishers have any."""

    def __init__(self, options: Options, peers: Peers, training: Gate, limit: Limit) -> None:
        self._options = options
        self._peers = peers
        self._training = training
        self._limit = limit
        self._links: dict[Pair, _Link] = {}
        self._place: Place | None = None
        self._count = 0
        self._kept = Kept()
        self._looked_at: set[Path] = set()

    @property
    def wanted(self) -> bool:
        """Is anything to be brought anywhere?"""
        return self._options.gather is not None or self._options.replicas > 0

    def broken(self) -> list[Pair]:
        """Links of this rank that need a new channel."""
        return [pair for pair, link in self._links.items() if link.channel is None]

    def behind(self) -> bool:
        """Do too many checkpoints of this rank wait?"""
        return any(behind(link.tasks) for link in self._links.values())

    def admit(self, *, any_behind: bool) -> bool:
        """Is what is saved next to be brought?  The same everywhere."""
        if any_behind and self._peers.rank == 0:
            log.warning(
                "the checkpoint that is saved now does not go to other nodes: earlier ones are still on their way. "
                "Save less often, or look at the network (wait_for_checkpoint() brings it if no later one was)."
            )
        return not any_behind

    def brought(self) -> list[int] | None:
        """What is elsewhere, as far as this rank has to do with it; None: nothing."""
        return self._kept.brought() if self._links else None

    def agree(self, brought: Sequence[list[int] | None]) -> None:
        """Keep the newest that is everywhere, not those before it; ``brought``: what every rank's ``brought`` said."""
        self._kept.agree(brought)

    def look_at(self, save_dir: Path, place: Place, *, loose: bool) -> None:
        """Before something new is saved or rotated there: which checkpoint of a former run must stay?

        Collective the first time; ``loose``: it is a Trainer's folder, one of several.
        """
        where = kept.where(save_dir, loose=loose)
        if place != self._place or where in self._looked_at:
            return
        self._looked_at.add(where)

        def look() -> list[Former]:
            return kept.former(where, loose=loose) if self._links else []

        seen = self._peers.run(look, "look at earlier checkpoints")
        publishers = [ranks[0] for ranks in place.all_places]
        found = kept.safest([seen[rank] for rank in publishers], self._options, len(publishers))
        if found is not None and self._links:
            self._kept.keep_former(where, where / found.inside / found.held.tag)

    def connect(self, place: Place, broken: Sequence[Pair]) -> None:
        """Be ready to bring what ``place`` saves.  Collective; ``broken``: what any rank's ``broken`` said.

        Raises PeerError on every rank when a connection cannot be made.
        """
        if not self.wanted or place.alone or (place == self._place and not broken):
            return
        peers = self._peers
        meeting = Meeting.call(peers)
        again = set(broken)
        wanted = pairs(place, self._options.gather is not None, self._options.replicas)

        def open_all() -> None:
            if place != self._place:
                self.close()
                self._links = {}
            for pair in wanted:
                if peers.rank in pair and (pair in again or pair not in self._links):
                    self._open(pair, place, meeting)

        peers.run(open_all, "connection of the nodes")
        self._place = place

    def _open(self, pair: Pair, place: Place, meeting: Meeting) -> None:
        channel = Channel(meeting, pair, self._peers.rank, self._options.timeout_seconds)
        if pair in self._links:
            self._links[pair].channel = channel
            return
        ranks = next(r for r in place.all_places if r[0] == pair[0])
        work = Background(Gate(self._training))
        sends = pair[0] == self._peers.rank
        self._links[pair] = _Link(pair, sends, channel.there, ranks, channel, work)

    def bring(self, saved: Saved, place: Place | None, *, loose: bool) -> None:
        """Queue what was just committed in ``place``.  On every rank, in the same order; returns at once."""
        if place != self._place:
            return  # a folder that all share: the links are those of another one
        self._count += 1
        if self._links:
            where = kept.where(saved.save_dir, loose=loose)
            self._kept.begin(self._count, saved, where, self._links)
        for link in self._links.values():
            errand = Errand(
                saved.save_dir,
                saved.tag,
                saved.checkpoint_id,
                link.ranks,
                loose,
                live=True,
                sealing=saved.sealing,
            )
            link.errands[self._count] = errand
            link.owed.add(self._count)
            self._submit(link, self._count)

    def _submit(self, link: _Link, number: int) -> None:
        errand = link.errands[number]
        link.tasks = [t for t in link.tasks if not t.wait(0) or t.error is not None]
        task = link.work.submit(
            f"{errand.tag} {'to' if link.sends else 'from'} {link.there}",
            # The channel of now, on both ends: later there may be another on one of them.
            partial(self._run, link, number, link.channel),
            self._options.timeout_seconds,
            awaited=True,
            at_end=catalog.use(errand.folder),
        )
        link.tasks.append(task)

    def owed(self) -> list[tuple[Pair, int]]:
        """The newest that each link of this rank has not brought, when nothing is under way."""
        return [(pair, max(link.owed)) for pair, link in self._links.items() if link.owed]

    def try_again(self, owed: Iterable[tuple[Pair, int]]) -> None:
        """What any end's ``owed`` said, after a ``connect``: both ends do the same.  Returns at once."""
        newest = dict(sorted(owed))
        for pair, link in self._links.items():
            if newest.get(pair) in link.errands:
                self._submit(link, newest[pair])

    def ended(self, seconds: float) -> bool:
        """True when nothing is under way any more, within the time."""
        deadline = time.monotonic() + seconds
        for link in self._links.values():
            with link.work.gate.waited_for():
                if not all(t.wait(max(0.0, deadline - time.monotonic())) for t in link.tasks):
                    return False
        return True

    def raise_failure(self) -> None:
        """Raise what went wrong since it was asked last."""
        tasks = [t for link in self._links.values() for t in link.tasks]
        for link in self._links.values():
            link.tasks = []
        over(tasks, 0.0)

    def close(self) -> None:
        """Wait for what is under way, within bounds."""
        for link in self._links.values():
            for task in link.tasks:
                task.reported = True  # it was logged when it happened
            link.work.close()

    # ---- in the link's thread ----

    def _run(self, link: _Link, number: int, channel: Channel | None) -> None:
        if channel is None:
            raise PeerError(
                f"the connection to {link.there} was lost",
                rank=link.there.rank,
                hint="the next save makes a new one",
            )
        problems: list[NvmeResumeError] = []
        try:
            (self._send if link.sends else self._take)(link, channel, number, problems)
        except Cancelled:
            raise
        except Exception as error:  # whatever it was, the two ends no longer agree on what comes next
            if link.channel is channel:
                link.channel = None
            problem = errors.of(error, f"copies {'to' if link.sends else 'from'} {link.there}")
            log.error("%s; it is tried again with the next save or wait", problem)  # noqa: TRY400 - no trace for users
            raise
        if problems:
            raise problems[0]

    def _send(self, link: _Link, channel: Channel, number: int, problems: list[NvmeResumeError]) -> None:
        """What is owed, then what the other side may lack from former runs."""
        newest = link.errands[number]
        for owed in sorted(n for n in tuple(link.owed) if n <= number):
            errand = link.errands[owed]
            channel.send(Turn(number=owed, tag=errand.tag))
            if self._serve(link, channel, errand, problems, owed):
                link.owed.discard(owed)
            else:  # who has waited for its hashes once does not wait again
                link.errands[owed] = replace(errand, sealing=False)
        for errand in self._former(newest) if link.fresh else ():
            beside = errand.save_dir.name if newest.loose else None
            channel.send(Turn(number=number, tag=errand.tag, beside=beside))
            self._serve(link, channel, errand, problems)
        link.fresh = False
        channel.send(Turn(number=None))
        _give_up_old(link, number)

    def _serve(
        self,
        link: _Link,
        channel: Channel,
        errand: Errand,
        problems: list[NvmeResumeError],
        number: int | None = None,
    ) -> bool:
        def serve() -> None:
            session.serve(channel, errand, self._limit, link.work.gate, self._options)
            self._kept.settle(number, link.pair)

        return _settled(serve, errand, f"for {link.there}", problems)

    def _former(self, newest: Errand) -> list[Errand]:
        """The last checkpoints before the newest one that this node has its part of, newest first.

        Not all there are: what was saved before anybody asked for copies need not fit.
        """
        if newest.loose:
            folders = [p for p in newest.save_dir.parent.iterdir() if p.is_dir() and layout.valid_tag(p.name)]
        else:
            folders = [newest.save_dir]
        found: list[tuple[int, Errand]] = []
        for folder in folders:
            for entry in catalog.others(folder, lambda saved: [r for r in newest.ranks if r < saved]):
                if entry.problem is None and (folder, entry.tag) != (newest.save_dir, newest.tag):
                    former = Errand(folder, entry.tag, entry.checkpoint_id, newest.ranks, newest.loose)
                    found.append((entry.step, former))
        return [errand for _, errand in sorted(found, key=lambda f: -f[0])][:_FORMER]

    def _take(self, link: _Link, channel: Channel, number: int, problems: list[NvmeResumeError]) -> None:
        """Whatever the other side brings."""
        newest = link.errands[number]
        while (said := channel.receive(Turn)).number is not None:
            known = link.errands.get(said.number, newest)
            errand = _meant(known, said)
            if errand is None:
                session.refuse(channel)
                continue
            fetch = partial(self._fetch, link, channel, errand, said.number if errand is known else None)
            if _settled(fetch, errand, f"from {link.there}", problems) and errand is known:
                link.owed.discard(said.number)
        _give_up_old(link, number)

    def _fetch(self, link: _Link, channel: Channel, errand: Errand, number: int | None) -> None:
        start = time.monotonic()
        brought = session.fetch(channel, errand, self._options, link.work.gate, _no_progress)
        self._kept.settle(number, link.pair)
        self._say(errand, brought, link.there, time.monotonic() - start)

    def _say(self, errand: Errand, brought: session.Brought, there: Node, seconds: float) -> None:
        if self._peers.rank != 0 or not brought.files:
            return
        folder, mib = errand.folder, brought.nbytes / (1 << 20)
        log.info(
            "%s: %.1f MiB in %d files came from %s in %.2f s", folder, mib, brought.files, there, seconds
        )
        if self._options.gather and catalog.look(errand.save_dir, errand.tag).problem is None:
            log.info("%s holds the files of all ranks", folder)


def _meant(known: Errand, said: Turn) -> Errand | None:
    """What the other side brings, in the terms of this node; None when there is nothing to do."""
    folder, tag = known.save_dir, said.tag
    if said.beside is not None:
        folder = folder.parent / said.beside
    if not (layout.valid_tag(folder.name) and layout.valid_tag(tag)):
        return None
    if (folder, tag) == (known.save_dir, known.tag):
        return known
    # One of a former run: only where this node kept its own part of it, and lacks that of the other.
    try:
        head = records.read_manifest(folder / tag)
    except NvmeResumeError:
        return None
    ranks = tuple(r for r in known.ranks if r < head.world_size)
    whole = catalog.look(folder, tag, lambda _: ranks).problem is None
    return None if whole or not ranks else Errand(folder, tag, head.checkpoint_id, ranks, known.loose)


def _settled(work: Callable[[], None], errand: Errand, way: str, problems: list[NvmeResumeError]) -> bool:
    """Do ``work``; False when it is to be tried again.

    An error that both sides know of is told, and the next checkpoint may go all the same.  Only for a checkpoint of
    this run is it kept: nobody waits for those of former runs.
    """
    try:
        work()
    except PeerError:
        raise
    except NvmeResumeError as error:
        if isinstance(error, ReplacedError) or not catalog.is_still(errand.folder, errand.checkpoint_id):
            log.info("%s %s ends: the checkpoint was removed or replaced", errand.tag, way)
        elif errand.live:
            log.error("%s %s: %s", errand.tag, way, error)  # noqa: TRY400 - no trace for users
            problems.append(error)
            return False
        else:
            log.warning("%s, of a former run, %s: %s", errand.tag, way, error)
    return True


def _give_up_old(link: _Link, number: int) -> None:
    """What could not be brought is tried again with the next saves, but not all of it for ever."""
    for old in sorted(n for n in tuple(link.owed) if n <= number)[:-_FORMER]:
        link.owed.discard(old)
        if link.sends:
            log.warning(
                "%s does not go to %s any more: it failed, and newer ones go first",
                link.errands[old].folder,
                link.there,
            )
    for old in sorted(link.errands)[:-_REMEMBERED]:
        if old not in link.owed:
            del link.errands[old]


def _no_progress(_: int) -> None:
    return
