"""One save: what each rank does, and how the ranks come to one commit.

On one filesystem the swap files are linked and frozen: nothing is copied, the hashes follow in the background.  Across
filesystems they are copied, while training waits or, with ``"async": true``, by a background thread that commits when
every rank's part is there.  That thread makes no collective calls: each rank's seal, written last, is the sign that its
part is complete, and the publisher looks for those of all ranks that share its disk.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nvme_resume import layout, logs, manifest
from nvme_resume.config import Options
from nvme_resume.errors import ConfigError, NvmeResumeError, PeerError, StorageError
from nvme_resume.manifest import FileRecord, FileSeal, Manifest, RankEntry, RankRecord
from nvme_resume.nodes.channel import Pair
from nvme_resume.nodes.links import Links
from nvme_resume.peers import Peers
from nvme_resume.places import Place, Places
from nvme_resume.storage import catalog, commit, ladder, prune, records, room, seal, transfer
from nvme_resume.storage import disk as seam
from nvme_resume.storage.background import Background, Task
from nvme_resume.storage.catalog import Saved
from nvme_resume.storage.limit import Limit
from nvme_resume.storage.ownership import Ownership
from nvme_resume.storage.snapshot import SwapFiles
from nvme_resume.uploads import Uploads
from nvme_resume.version import __version__
from nvme_resume.zero3 import capture, monitor, quiesce, stock_loader, supported

log = logs.logger

_SLACK_BYTES = 64 << 20  # records, model file, filesystem overhead
_SLACK_FILES = 32  # records, DeepSpeed's files, folders, temporary names
_POLL_SECONDS = 0.05
_MOST_UNSEALED = 8


class _Proposal(NamedTuple):
    """What each rank says at the start of a save; plain data."""

    checkpoint_id: str  # rank 0's counts
    save_dir: str
    tag: str
    known: bool  # has it looked at this file system?
    broken: list[Pair]  # links to other nodes
    hashes_behind: bool  # so many wait that this save gets none
    uploads_behind: bool
    copies_behind: bool  # on other nodes
    brought: list[int] | None  # what Links.brought says


class Saver:
    """All saves of one engine with state on NVMe."""

    def __init__(
        self, engine: Any, options: Options, peers: Peers, files: SwapFiles, work: Background
    ) -> None:
        self._engine = engine
        self._options = options
        self._peers = peers
        self._files = files
        self._work = work
        self._rungs: dict[tuple[Path, int], ladder.Rung] = {}  # by private folder and file system
        self._drain: Task | None = None  # this rank's part of the save that is under way
        self._commit: Task | None = None  # the publisher's
        self._pending: Callable[[], None] | None = None  # what gives up the save that is under way
        self._in_background = False  # on some rank: agreed
        self._said_no_background = False
        self.places = Places(peers)
        self._place: Place | None = None  # where the present save goes
        self._owned = Ownership()  # of the save folder that this engine writes to
        self.narrate = True  # does rank 0 log starts and commits?
        self._rotation: list[Task] = []
        limit = Limit(options.network_limit_mib)
        self._links = Links(options, peers, work.gate, limit)
        self._uploads = Uploads(options, peers, work.gate, limit)
        self._sealing = True  # does the present save get hashes?  The same on all ranks
        self._bring = self._upload = False  # does the present save go to other nodes, to a URL?
        self._unspread: Saved | None = None  # saved inside a larger checkpoint that had no name yet
        self._put_off: list[Callable[[], None]] = []  # what begins what was not begun for the last commit
        self._put_off_next: list[Callable[[], None]] = []  # the same for the save that is under way
        self._commit_seconds: list[float] = []  # of the last save, when the background has committed it

    # ---- the public two ----

    def save(
        self, save_dir: Path, tag: str, client_state: dict[str, Any], *, latest: bool, no_frozen: bool
    ) -> None:
        """Collective.  Returns after the commit, or after the freeze when the copy goes on in the background."""
        if self._in_background:
            self.wait()
        peers, engine = self._peers, self._engine
        start = time.monotonic()
        proposals = peers.run(lambda: self._propose(save_dir, tag), "start of the save")
        # Inside a larger checkpoint its builder has agreed on the folder; nodes may know it by different paths.
        peers.agree(
            [(p.save_dir, p.tag) if self.narrate else p.tag for p in proposals], "save folder and tag"
        )
        checkpoint_id = proposals[0].checkpoint_id
        place = self._enter(self.places.of(save_dir, [p.known for p in proposals]))
        self._links.agree([p.brought for p in proposals])
        self._links.connect(place, [pair for p in proposals for pair in p.broken])
        if self.narrate:
            self._links.look_at(save_dir, place, loose=False)
        self._bring = self._links.admit(any_behind=any(p.copies_behind for p in proposals))
        self._sealing = not any(p.hashes_behind for p in proposals)
        self._upload = self._uploads.admit(
            any_behind=not self._sealing or any(p.uploads_behind for p in proposals)
        )
        staging = layout.staging(tag, checkpoint_id)
        if self._reports():
            log.info("saving checkpoint %s to %s", tag, save_dir)
        stock_loader.before(engine)
        part = _Part(self, save_dir, staging, checkpoint_id, tag)
        if self.publishes():
            catalog.under_way.add(part.folder)
        try:
            needs = peers.run(lambda: part.look(no_frozen), "look at what there is to save")
            room.refuse_too_little(needs, "the checkpoint and the next step beside it", tag=tag)
            sizes = peers.run(lambda: part.write(client_state, no_frozen), "save")
            head = self._manifest(checkpoint_id, tag, sizes)
            if any(s["pending"] for s in sizes):
                self._finish_later(part, head, sizes, start, latest=latest)
            else:
                peers.run(
                    lambda: (
                        self.publishes() and bool(commit.publish(save_dir, staging, head, save_latest=latest))
                    ),
                    "commit",
                )
        except BaseException as error:
            part.abandon()
            catalog.under_way.discard(part.folder)
            if self.publishes():
                commit.discard(save_dir, staging, checkpoint_id)
            # Only an error that was exchanged is known to reach every rank; else a collective would hang.
            if isinstance(error, NvmeResumeError) and not isinstance(error, PeerError):
                stock_loader.after(engine)
            raise
        stock_loader.after(engine)
        blocked = time.monotonic() - start
        if peers.rank == 0:
            monitor.write(engine, {"blocked_seconds": blocked, "bytes": sum(s["bytes"] for s in sizes)})
        saved = Saved(save_dir, tag, checkpoint_id, self._in_background or self._sealing)
        if self._in_background:
            self._begin(saved, latest=latest, committed=False)
            return
        if peers.rank == 0:
            monitor.write(engine, {"commit_seconds": blocked})
        catalog.under_way.discard(part.folder)
        if self._reports():
            _log_commit(save_dir / tag, sizes, start)
        self._begin(saved, latest=latest)
        if self.publishes() and self._options.keep_last is not None:
            # After the above, which knows what must stay.  In the background: blocks of large files take long to free.
            ranks = self._ranks_here()
            task = self._work.submit(
                "rotation", lambda: self._rotate(save_dir, ranks), self._options.exit_seconds
            )
            self._rotation = [*(t for t in self._rotation if not t.wait(0)), task]
        part.seal_later(save_dir / tag)

    def spread_last(self, save_dir: Path) -> None:
        """Bring what was saved inside a larger checkpoint, and lies in ``save_dir`` now, to other nodes.

        On every rank.  Together with the files that lie beside the tag folder.
        """
        saved, self._unspread = self._unspread, None
        if saved is not None and self._place is not None:
            self._links.look_at(save_dir, self._place, loose=True)
            self._begin(saved._replace(save_dir=save_dir), latest=True, below=save_dir.name)

    def _begin(self, saved: Saved, *, latest: bool, below: str | None = None, committed: bool = True) -> None:
        """Begin what goes on after a commit; ``below``: the name of a larger checkpoint that it is a part of.

        Where it is not ``committed`` yet, whoever commits it begins what is not put off.
        """
        if not self.narrate and below is None:
            self._unspread = saved  # it has no name yet
            return
        place, loose = self._place, below is not None
        bring = partial(self._links.bring, saved, place, loose=loose)
        upload = partial(self._uploads.begin, saved, place, latest=latest, below=below)
        put_off: list[Callable[[], None]] = []
        for wanted, now, begin in (
            (self._links.wanted, self._bring, bring),
            (self._uploads.wanted, self._upload, upload),
        ):
            if wanted and now and committed:
                begin()
            elif wanted and not now:
                put_off.append(begin)
        if committed:
            self._put_off = put_off
        else:
            self._put_off_next = put_off

    def wait(self) -> None:
        """Until the save under way is committed.  Collective; raises what went wrong on any rank, on every rank."""
        if not self._in_background:
            return
        try:
            # First every rank's own part: while one has failed, the publisher would wait for it in vain.
            self._peers.run(lambda: self._wait_for(self._drain), "copy of the checkpoint")
            self._peers.run(lambda: self._wait_for(self._commit), "commit")
            self._put_off = self._put_off_next
        except NvmeResumeError:
            if self._pending is not None:
                self._pending()
            raise
        finally:
            self._drain = self._commit = self._pending = None
            self._put_off_next = []
            self._in_background = False
            self.tell_monitors()

    def tell_monitors(self) -> None:
        """How long the last save that went on in the background took, once it is committed.  From training's thread."""
        if self._commit_seconds and self._peers.rank == 0:
            monitor.write(self._engine, {"commit_seconds": self._commit_seconds.pop()})

    def wait_for_rotation(self) -> None:
        """Until old checkpoints are gone that this process was to remove."""
        self._work.wait_for(self._rotation)

    def close(self) -> None:
        """Give up the save folder."""
        self._owned.close()

    def end(self) -> None:
        """Wait, within bounds, for what goes to other nodes and comes from them; give up the save folder."""
        self._links.close()
        self._uploads.close()
        self.close()

    def wait_for_all(self) -> None:
        """The same, until hashes of linked files are written, other nodes have their copies, uploads are through.

        Collective.
        """
        self.wait()
        self._peers.run(self._work.finish, "background work of the last save")
        self._wait_for_copies()
        if self._begin_again():
            self._wait_for_copies()

    def _wait_for_copies(self) -> None:
        peers = self._peers
        if self._links.wanted:
            peers.together(self._links.ended, "copies on other nodes")
            peers.run(self._links.raise_failure, "copies on other nodes")
        if self._uploads.wanted:
            peers.together(self._uploads.ended, "upload")
            peers.run(self._uploads.raise_failure, "upload")

    def _begin_again(self) -> bool:
        """What was put off, and what has failed and was told of; False when there is nothing.  Collective."""
        links, uploads = self._links, self._uploads
        if self._place is None or not (links.wanted or uploads.wanted):
            return False
        said = self._peers.run(
            lambda: (links.broken(), links.owed(), uploads.owed()), "look at what is to be copied"
        )
        owed = [item for _, of_links, _ in said for item in of_links]
        if not (self._put_off or owed or any(of_uploads for _, _, of_uploads in said)):
            return False
        links.connect(self._place, [pair for broken, _, _ in said for pair in broken])
        links.try_again(owed)
        uploads.try_again()
        put_off, self._put_off = self._put_off, []
        for begin in put_off:
            begin()
        return True

    def _wait_for(self, task: Task | None) -> None:
        if task is None:
            return
        self._work.finish_these(task)

    # ---- steps ----

    def publishes(self) -> bool:
        """One process for each place the checkpoint is written to, as far as that is known."""
        return self._place is not None and self._place.publisher

    def _reports(self) -> bool:
        return self.narrate and self._peers.rank == 0

    def _ranks_here(self) -> tuple[int, ...]:
        """The ranks that share the save folder with this one."""
        return () if self._place is None else self._place.ranks

    def prepare_folder(self, save_dir: Path) -> None:
        """Make the save folder and find out who shares it.  Collective."""
        self._enter(self.places.make(save_dir, "look at the save folder"))

    def _enter(self, place: Place) -> Place:
        """Save there from now on; say so where the configuration says otherwise."""
        if place == self._place:
            return place
        self._place = place
        flag = self._engine.use_node_local_storage()
        if self._peers.rank == 0 and flag == place.alone and not self._peers.alone:
            log.warning(
                '"use_node_local_storage" is %s, but %s: %s',
                str(flag).lower(),
                "all ranks see the same save folder"
                if place.alone
                else f"the ranks see {len(place.all_places)} save folders: {_in_words(place.all_places)}",
                "rank 0 alone commits there"
                if place.alone
                else "each is committed where it lies, and a resume needs all of them",
            )
        return place

    def own(self, save_dir: Path) -> None:
        """Be the one job that saves there, until another folder is saved to.  LockedError names the other."""
        self._owned.take(save_dir)

    def _rotate(self, save_dir: Path, ranks: tuple[int, ...]) -> None:
        """Remove old checkpoints.  A failure is not worth an error: the new one is committed."""
        keep = self._options.keep_last
        if keep is None:
            return
        try:
            gone = prune.prune(save_dir, keep, lambda saved: (r for r in ranks if r < saved))
        except (OSError, NvmeResumeError) as error:
            log.warning("old checkpoints in %s could not be removed: %s", save_dir, error)
        else:
            if gone:
                log.info("removed %s from %s (keep_last %d)", ", ".join(gone), save_dir, keep)

    def _propose(self, save_dir: Path, tag: str) -> _Proposal:
        """Refuse what cannot work before anything is touched; rank 0's answer names the checkpoint's id."""
        self._work.raise_failure()
        if not layout.valid_tag(tag):
            raise ConfigError("not a usable tag", tag=tag, expected="one plain folder name")
        quiesce.quiesce(self._engine)
        quiesce.accumulation(self._engine)
        self._files.refuse_intruders()
        seam.current().make_folder(save_dir)
        return _Proposal(
            checkpoint_id=uuid.uuid4().hex[:12],
            save_dir=str(save_dir),
            tag=tag,
            known=self.places.known(save_dir),
            broken=self._links.broken(),
            hashes_behind=self._work.pending() >= _MOST_UNSEALED,
            uploads_behind=self._uploads.behind(),
            copies_behind=self._links.behind(),
            brought=self._links.brought(),
        )

    @property
    def copies_in_background(self) -> bool:
        """Is ``"async"`` wanted, and possible?

        Nodes with disks of their own must commit together, which takes the training's thread.
        """
        if not self._options.background_save:
            return False
        if self._place is None or self._place.alone:
            return True
        if not self._said_no_background:
            self._said_no_background = True
            log.warning(
                '"async" has no effect where nodes save to disks of their own: saves wait for their copies'
            )
        return False

    def _manifest(self, checkpoint_id: str, tag: str, sizes: list[dict[str, Any]]) -> Manifest:
        return Manifest(
            checkpoint_id=checkpoint_id,
            tag=tag,
            global_steps=self._engine.global_steps,
            world_size=self._peers.world_size,
            sealed=all(s["sealed"] for s in sizes),
            created=sizes[0]["created"],  # rank 0's clock: the manifest is the same on every node
            versions={
                "nvme_resume": __version__,
                "deepspeed": supported.version(),
                "torch": str(torch.__version__),
            },
            settings=capture.settings(self._engine),
            ranks=tuple(
                RankEntry(rank=r, host=s["host"], record=s["record"], extras=s["extras"])
                for r, s in enumerate(sizes)
            ),
        )

    def _finish_later(
        self, part: _Part, head: Manifest, sizes: list[dict[str, Any]], start: float, *, latest: bool
    ) -> None:
        """Leave the copy, and on the publisher the commit, to the background thread."""
        save_dir, staging, options = part.save_dir, part.staging, self._options
        self._in_background = True
        self._drain = self._work.submit(
            f"copy of checkpoint {head.tag}", part.drain, options.timeout_seconds, awaited=True
        )
        report, narrate, ranks = self._reports(), self.narrate, self._ranks_here()
        upload, place = self._upload, self._place
        given_up = threading.Event()
        seconds: list[float] = []
        self._commit_seconds = seconds

        def publish() -> None:
            try:
                _await_seals(part.folder, len(sizes), self._work, options.timeout_seconds, given_up)
                commit.publish(save_dir, staging, head, save_latest=latest)
                if narrate and upload:
                    saved = Saved(save_dir, head.tag, head.checkpoint_id, sealing=True)
                    self._uploads.begin(saved, place, latest=latest)
                self._rotate(save_dir, ranks)
            except BaseException:
                commit.discard(save_dir, staging, head.checkpoint_id)
                raise
            finally:
                catalog.under_way.discard(part.folder)
            seconds.append(time.monotonic() - start)
            if report:
                _log_commit(save_dir / head.tag, sizes, start)

        if self.publishes():
            self._commit = self._work.submit(
                f"commit of checkpoint {head.tag}", publish, options.timeout_seconds, awaited=True
            )

        def give_up() -> None:
            given_up.set()
            if self._commit is not None:
                self._work.drop([self._commit])
                commit.discard(save_dir, staging, head.checkpoint_id)  # if it was never begun
                catalog.under_way.discard(part.folder)

        self._pending = give_up

    def rung(self, public: Path, save_dir: Path) -> ladder.Rung:
        """How this swap file gets into a checkpoint below ``save_dir``; found out once, and said once."""
        folder = self._files.folder(public.parent)
        key = (folder.path, seam.current().device(save_dir))
        if key not in self._rungs:
            wanted = self._options.method
            self._rungs[key] = ladder.probe(folder.path, save_dir) if wanted == "auto" else wanted
            if self._peers.rank == 0:
                log.info(
                    "swap files get from %s to %s by %s", public.parent, save_dir, _WORDS[self._rungs[key]]
                )
        return self._rungs[key]


_WORDS: dict[ladder.Rung, str] = {
    "link": "links (nothing is copied)",
    "reflink": "reflinks (blocks are shared)",
    "server": "copy_file_range",
    "direct": "the O_DIRECT copier",
}


class _Part:
    """One rank's part of one save."""

    def __init__(self, saver: Saver, save_dir: Path, staging: str, checkpoint_id: str, tag: str) -> None:
        self.save_dir = save_dir
        self.staging = staging
        self.folder = save_dir / staging
        self._checkpoint_id = checkpoint_id
        self._tag = tag
        self._saver = saver
        self._rank = saver._peers.rank
        self._files = saver._files
        self._options = saver._options
        self._gate = saver._work.gate
        self._taken: capture.Captured
        self._rungs: list[ladder.Rung]  # how each of its files gets into the checkpoint
        self._record: RankRecord | None = None
        self._seals: dict[str, FileSeal] = {}  # hashes taken so far
        self._held: list[tuple[Path, capture.SwapCopy]] = []  # to be copied in the background
        self._sealed = False

    def look(self, no_frozen: bool) -> list[dict[str, Any]]:
        """Describe this rank's state, which must be partitioned by now; the room that saving it takes."""
        saver = self._saver
        if saver.publishes():
            saver.own(self.save_dir)
        self._taken = capture.capture(
            saver._engine,
            checkpoint_id=self._checkpoint_id,
            tag=self._tag,
            rank=self._rank,
            world_size=saver._peers.world_size,
            frozen=not no_frozen,
        )
        needs = room.Needs(saver._peers.host)
        needs.add(self.save_dir, _SLACK_BYTES, _SLACK_FILES + len(self._taken.copies))
        fresh: list[tuple[Path, int]] = []
        self._rungs = [saver.rung(copy.public, self.save_dir) for copy in self._taken.copies]
        for copy, rung in zip(self._taken.copies, self._rungs, strict=True):
            copied = rung in ("server", "direct")
            if copied:
                needs.add(self.save_dir, copy.nbytes, 0)
            if copy.rewritten and (not copied or saver.copies_in_background):
                fresh.append((copy.public, copy.nbytes))
        if fresh:
            needs.add(fresh[0][0].parent, self._files.room_for(fresh), len(fresh))
        return needs.plain()

    def write(self, client_state: dict[str, Any], no_frozen: bool) -> dict[str, Any]:
        """All files of this rank that training has to wait for, durable."""
        saver, disk, folder, taken = self._saver, seam.current(), self.folder, self._taken
        engine, peers, options = saver._engine, saver._peers, self._options
        for parent in {(folder / c.relative).parent for c in taken.copies} | {folder / layout.RECORDS}:
            disk.make_folder(parent)
        listed = self._place(taken.copies, self._rungs)
        capture.write_stock_files(engine, self.save_dir, self.staging, client_state, no_frozen)
        extras = capture.write_extras(
            engine, folder, checkpoint_id=self._checkpoint_id, rank=peers.rank, with_rng=options.rng
        )
        small = [taken.record.model_file, taken.record.optim_file]
        small += [extras.tensors_file] if extras.tensors_file else []
        small_seals = transfer.run(
            [transfer.Copy(folder / name) for name in small],
            options,
            what="hash",
            sync=False,
            buffered=True,
            live=True,
        )
        self._seals |= dict(zip(small, small_seals, strict=True))
        listed |= {name: FileRecord(size=s.size, digest=s.digest) for name, s in self._seals.items()}
        record = taken.record.model_copy(update={"files": listed})
        self._record = record
        records.write(folder, layout.rank_record(peers.rank), record)
        records.write(folder, layout.extras(peers.rank), extras)
        new = [*small, layout.rank_record(peers.rank), layout.extras(peers.rank)]
        if not self._held and (options.seal == "before_commit" or len(self._seals) == len(listed)):
            full = seal.take(folder, record, options, known=self._seals, show=peers.rank == 0)
            records.write(folder, layout.seal(peers.rank), full)
            new.append(layout.seal(peers.rank))
            self._sealed = True
        held = {c.relative for _, c in self._held}
        new += [name for name in listed if name not in small and name not in held]
        commit.sync_all([folder / name for name in new], commit.folders_of(folder))
        return {
            "host": peers.host,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "record": manifest.digest_of(record),
            "extras": manifest.digest_of(extras),
            "bytes": sum(f.size for f in listed.values()),
            "linked": sum(f.size for f in listed.values() if f.inode is not None),
            "sealed": self._sealed or bool(self._held),
            "pending": bool(self._held),
        }

    def _place(self, copies: tuple[capture.SwapCopy, ...], rungs: list[ladder.Rung]) -> dict[str, FileRecord]:
        """Get every swap file into the checkpoint, or freeze it for the background; files whose hash is not known."""
        disk, files = seam.current(), self._files
        listed: dict[str, FileRecord] = {}
        direct: list[capture.SwapCopy] = []
        for copy, rung in zip(copies, rungs, strict=True):
            target = self.folder / copy.relative
            if self._saver.copies_in_background and rung in ("server", "direct"):
                with contextlib.suppress(
                    OSError
                ):  # the swap folder allows no renames: copy while training waits
                    path = files.hold(copy.public, copy.nbytes, rewritten=copy.rewritten)
                    self._held.append((path, copy))
                    listed[copy.relative] = FileRecord(size=copy.nbytes)
                    continue
            try:
                if rung == "link":
                    found = files.link_into(copy.public, copy.nbytes, target, rewritten=copy.rewritten)
                    listed[copy.relative] = FileRecord(
                        size=found.size, inode=found.inode, mtime_ns=found.mtime_ns
                    )
                    continue
                if rung != "direct":
                    ladder.put(rung, files.source(copy.public), target, copy.nbytes)
                    disk.cut(target, copy.nbytes, files.folder(copy.public.parent).file_mode)
                    listed[copy.relative] = FileRecord(size=copy.nbytes)
                    continue
            except OSError as error:
                if error.errno not in ladder.STEP_DOWN or self._options.method != "auto":
                    raise
                disk.remove_tree(target)
            direct.append(copy)
        seals = transfer.run(
            [
                transfer.Copy(files.source(c.public), self.folder / c.relative, nbytes=c.nbytes)
                for c in direct
            ],
            self._options,
            what=f"save {self._tag}",
            sync=True,
            show=self._rank == 0,
            live=True,
        )
        self._seals |= dict(zip((c.relative for c in direct), seals, strict=True))
        return listed

    def drain(self) -> None:
        """In the background: copy what was frozen, write the seal.  Leaves a mark for the publisher when it fails."""
        record = self._record
        assert record is not None
        try:
            seals = transfer.run(
                [transfer.Copy(p, self.folder / c.relative, nbytes=c.nbytes) for p, c in self._held],
                self._options,
                what=f"copy of checkpoint {self._tag}",
                sync=True,
                gate=self._gate,
                live=True,
            )
            self._seals |= dict(zip((c.relative for _, c in self._held), seals, strict=True))
            full = seal.take(self.folder, record, self._options, known=self._seals, gate=self._gate)
            commit.sync_all([], commit.folders_of(self.folder))
            # The publisher, who waits for it, syncs its name: once it is there nothing of this part can fail any more.
            records.write_late(self.folder, layout.seal(self._rank), full, sync_name=False)
        except BaseException:
            _leave_mark(self.folder, self._rank)
            raise
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Let go of frozen files that were to be copied."""
        held, self._held = self._held, []
        for path, _ in held:
            self._files.release(path)

    def seal_later(self, folder: Path) -> None:
        """Hash what was linked, behind the training's back."""
        record = self._record
        if self._sealed or record is None:
            return
        options, gate, known = self._options, self._gate, self._seals
        if not self._saver._sealing:
            log.warning(
                "%s stays without hashes: %d earlier ones wait for theirs. It loads all the same, and the load will "
                'add them. Save less often, or set "seal": "before_commit".',
                folder,
                _MOST_UNSEALED,
            )
            return
        try:
            opened = seal.HeldFolder(folder)
        except FileNotFoundError:
            return  # removed already
        self._saver._work.submit(
            f"hashes of checkpoint {self._tag}",
            lambda: seal.add(opened, record, options, gate, known),
            options.exit_seconds,
        )


def _in_words(places: tuple[tuple[int, ...], ...]) -> str:
    return " and ".join(f"rank{'s' * (len(p) > 1)} {', '.join(map(str, p))}" for p in places)


def _leave_mark(folder: Path, rank: int) -> None:
    """Tell the publisher not to wait for this rank.  Best effort: its disk may be the reason."""
    with contextlib.suppress(OSError):
        seam.current().write(folder / layout.failure(rank), b"", sync=False)


def _await_seals(
    folder: Path, world_size: int, work: Background, seconds: float, given_up: threading.Event
) -> None:
    """Until all ranks' parts are complete.  StorageError when one failed or did not come."""
    deadline = time.monotonic() + seconds
    while missing := [r for r in range(world_size) if not (folder / layout.seal(r)).exists()]:
        work.gate.check()
        failed = [r for r in range(world_size) if (folder / layout.failure(r)).exists()]
        if failed or given_up.is_set():
            problem = f"ranks {failed or missing} could not copy their part of the checkpoint"
        elif not folder.is_dir():
            problem = "the unfinished checkpoint was removed"
        elif time.monotonic() > deadline:
            problem = f"ranks {missing} did not complete their part within {seconds:.0f} s"
        else:
            time.sleep(_POLL_SECONDS)
            continue
        raise StorageError(
            problem, path=str(folder), hint="look at the log of the ranks named; nothing was committed"
        )


def _log_commit(path: Path, sizes: list[dict[str, Any]], start: float) -> None:
    total, linked = (sum(s[key] for s in sizes) for key in ("bytes", "linked"))
    log.info(
        "committed %s: %.1f MiB (%.1f MiB of them linked, not copied) in %.2f s",
        path,
        total / (1 << 20),
        linked / (1 << 20),
        time.monotonic() - start,
    )
