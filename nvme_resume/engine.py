"""``NvmeResumeEngine``: the face of the package, a mixin in front of a live DeepSpeed engine's class.

Orders the steps of a save and of a load and speaks to the user; how DeepSpeed works inside is ``zero3``'s
business, how files become durable is ``storage``'s.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvme_resume import config, layout, logs, manifest, uploads
from nvme_resume.config import Options
from nvme_resume.downloads import Downloads
from nvme_resume.errors import (
    ConfigError,
    CorruptError,
    NoCheckpointError,
    NvmeResumeError,
    PeerError,
)
from nvme_resume.nodes.supply import supply
from nvme_resume.peers import Peers
from nvme_resume.save import Saver
from nvme_resume.storage import catalog, ownership, records, room
from nvme_resume.storage import disk as seam
from nvme_resume.storage.background import Background, Task
from nvme_resume.storage.remote import is_url
from nvme_resume.storage.snapshot import SwapFiles
from nvme_resume.zero3 import adam, capture, quiesce, redirect, stock_loader, supported
from nvme_resume.zero3.restore import Restore, Wanted, restore_rng_of
from nvme_resume.zero3.source import Checkpoint

log = logs.logger


class NvmeResumeEngine(stock_loader.StockOverrides):
    """A DeepSpeed engine whose checkpoints hold, and bring back, all of its state.

    Never instantiated: ``wrap`` turns a live engine into one.  ``isinstance(engine, DeepSpeedEngine)`` and all
    signatures stay as they were.
    """

    if TYPE_CHECKING:
        # What the mixin uses of the DeepSpeed engine it is mixed into.
        optimizer: Any
        global_steps: int
        micro_steps: int
        config: Any

        def load_universal_checkpoint(self) -> bool: ...

    _nvme_options: Options
    _nvme_peers: Peers
    _nvme_files: SwapFiles
    _nvme_work: Background
    _nvme_saver: Saver
    _nvme_checks: list[Task] | None  # adopted files on some rank are still being verified: those of this rank

    @classmethod
    def wrap(cls, engine: Any) -> Any:
        """Return the same engine, now saving and resuming exactly.

        Options come from ``"nvme_checkpoint"`` in the engine's DeepSpeed configuration; without the key the
        defaults apply, ``false`` leaves the engine as it is.  Repeating is harmless.  Collective: call it on
        every rank.  Raises ConfigError (bad options, too few swap buffers) or UnsupportedError.
        """
        if isinstance(engine, cls):
            return engine
        if not supported.is_engine(engine):
            raise ConfigError(
                "wrap() takes the engine that deepspeed.initialize returns",
                expected="DeepSpeedEngine",
                found=type(engine).__name__,
                hint="engine, *_ = deepspeed.initialize(...); NvmeResumeEngine.wrap(engine)",
            )
        options = config.parse(engine.config.get(config.KEY, True))
        if options is None:
            return engine
        logs.ensure_visible()
        supported.refuse_unsupported(engine)
        supported.refuse_too_few_buffers(engine)
        supported.warn_misread_gradients(engine)
        if supported.version() not in supported.TESTED_DEEPSPEED:
            log.warning(
                "DeepSpeed %s is not one nvme_resume was tested with (%s)",
                supported.version(),
                ", ".join(supported.TESTED_DEEPSPEED),
            )
        peers, files, work = Peers(options.timeout_seconds), SwapFiles(options), Background()
        uses_nvme = supported.uses_nvme(engine)

        def check() -> dict[str, Any]:
            uploads.check(options, uses_nvme=uses_nvme)
            return options.of_the_job()

        peers.agree(peers.run(check, "start"), f'options of "{config.KEY}"')
        if uses_nvme:
            try:
                peers.run(lambda: redirect.install(engine, files, work.gate), "start")
            except NvmeResumeError:
                files.close()
                raise
            atexit.register(files.close)
        saver = Saver(engine, options, peers, files, work)
        atexit.register(saver.end)
        engine.__dict__.update(
            _nvme_options=options,
            _nvme_peers=peers,
            _nvme_files=files,
            _nvme_work=work,
            _nvme_saver=saver,
            _nvme_checks=None,
        )
        base = type(engine)
        engine.__class__ = type(f"NvmeResume{base.__name__}", (cls, base), {"__module__": base.__module__})
        adam.watch(engine)
        return engine

    # ---- save ----

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | int | None = None,
        client_state: dict[str, Any] = {},
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """DeepSpeed's ``save_checkpoint``: same arguments, same files, plus all that it loses.

        Collective.  Raises the same NvmeResumeError subclass on every rank when any rank fails; then nothing
        was published and training may go on.
        """
        if not save_dir:
            raise ConfigError("save_dir must not be empty", found=repr(save_dir))
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        if supported.uses_nvme(self):
            self._finish_checks()
            self._nvme_saver.save(
                Path(save_dir), name, client_state, latest=save_latest, no_frozen=exclude_frozen_parameters
            )
            return True
        self._nvme_saver.prepare_folder(Path(save_dir))
        self._nvme_peers.run(lambda: self._before_stock_save(Path(save_dir) / name), "start of the save")
        super().save_checkpoint(  # type: ignore[misc]
            save_dir,
            tag=name,
            client_state=client_state,
            save_latest=save_latest,
            exclude_frozen_parameters=exclude_frozen_parameters,
        )
        self._save_hidden_state(Path(save_dir) / name)
        return True

    def wait_for_checkpoint(self) -> None:
        """Until the last save is committed and its hashes are written.

        Collective.  Raises, on every rank, what went wrong in the background on any.
        """
        self._nvme_saver.wait_for_all()

    @contextlib.contextmanager
    def inside_larger_checkpoint(self) -> Iterator[None]:
        """What is saved here is a part of a folder that the caller builds, names and tells of.

        Collective.  On return the saves are committed and nothing holds on to the folder they went to: it may be
        renamed (hashes that are still being taken follow it).
        """
        saver = self._nvme_saver
        saver.narrate = False
        try:
            yield
            saver.wait()
        except NvmeResumeError as error:
            if not isinstance(error, PeerError):  # every rank has it
                with contextlib.suppress(NvmeResumeError):
                    saver.wait()
            raise
        finally:
            saver.narrate = True
            saver.close()

    def committed_as(self, folder: Path) -> None:
        """What ``inside_larger_checkpoint`` saved last has its final name, ``folder / <tag>``, with other files beside.

        On every rank.  Begins what goes on in the background after a commit.
        """
        self._nvme_saver.spread_last(folder)

    def _before_stock_save(self, folder: Path) -> None:
        """Refuse what could not be resumed; forget what DeepSpeed is about to overwrite in place."""
        if supported.is_zero3(self):
            quiesce.accumulation(self)
        if layout.valid_tag(folder.name) and self._nvme_saver.publishes():
            self._nvme_saver.own(folder.parent)
            # First: without it the rest is no checkpoint.
            seam.current().remove_tree(folder / layout.manifest())
            for name in (layout.RECORDS, layout.SWAP, layout.PARAMS):
                seam.current().remove_tree(folder / name)

    def _save_hidden_state(self, folder: Path) -> None:
        """Beside a checkpoint of plain DeepSpeed: CPUAdam's counters and the random states."""
        peers, options = self._nvme_peers, self._nvme_options

        def write() -> None:
            seam.current().make_folder(folder / layout.RECORDS)
            for name in (layout.extras(peers.rank), layout.extras_tensors(peers.rank)):
                seam.current().remove_tree(folder / name)
            extras = capture.write_extras(
                self, folder, checkpoint_id="deepspeed", rank=peers.rank, with_rng=options.rng
            )
            records.write(folder, layout.extras(peers.rank), extras)

        peers.run(write, "save of the hidden state")

    # ---- load ----

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, Any]:
        """DeepSpeed's ``load_checkpoint``: same arguments and result, and the run continues to the last bit.

        ``load_dir`` may be a URL (``s3://bucket/run``) that ``"upload"`` filled: each node downloads its ranks' files.

        Everything is checked on every rank before anything is touched; on an error (the same type on every
        rank) engine, swap folder and checkpoint are as they were.
        """
        peers, saver = self._nvme_peers, self._nvme_saver
        if is_url(load_dir):
            saver.wait()
            downloads = Downloads(self._nvme_options, peers, saver.places, config.nvme_paths(self.config))
            return downloads.load(
                load_dir,
                None if tag is None else str(tag),
                lambda folder, name: self.load_checkpoint(
                    folder,
                    name,
                    load_module_strict,
                    load_optimizer_states,
                    load_lr_scheduler_states,
                    load_module_only,
                    custom_load_fn,
                ),
            )
        wanted = Wanted(
            optimizer_states=load_optimizer_states,
            lr_scheduler_states=load_lr_scheduler_states,
            module_only=load_module_only,
            strict=load_module_strict and custom_load_fn is None,
            rng=self._nvme_options.rng,
        )
        if self.load_universal_checkpoint():  # it names its own tag file and holds none of our records
            # DeepSpeed will write to the public names.
            peers.run(self._nvme_files.thaw_all, "preparation of the load")
            return self._load_stock(load_dir, tag, None, wanted, custom_load_fn)
        saver.wait()
        saver.wait_for_rotation()
        peers.run(lambda: ownership.mend(Path(load_dir)), "look at the checkpoint folder")
        if supported.is_zero3(self):
            supply(Path(load_dir), None if tag is None else str(tag), peers, saver.places, self._nvme_options)
        damaged: dict[str, CorruptError] = {}  # what looked complete and was not what had been saved
        mended: set[str] = set()  # what other nodes were asked for good parts of
        while True:
            try:
                name = self._choose(Path(load_dir), tag, damaged)
            except NvmeResumeError:
                for first in damaged.values():
                    raise first from None  # nothing else is there
                raise
            if name is None or not supported.is_zero3(self):
                return self._load_stock(load_dir, name, name, wanted, custom_load_fn)
            folder = Path(load_dir) / name
            if self._stock_can_load(folder):
                return self._load_stock(load_dir, name, name, wanted, custom_load_fn)
            try:
                restore = self._open(folder, wanted)
            except CorruptError as error:
                if name not in mended and self._mend(Path(load_dir), name, error):
                    mended.add(name)
                elif tag is not None:
                    raise
                else:
                    damaged[name] = error
                continue
            return self._finish(restore, wanted, custom_load_fn)

    def _choose(
        self, load_dir: Path, tag: str | int | None, damaged: Mapping[str, CorruptError]
    ) -> str | None:
        """The tag to load, the same on all ranks; None when the folder holds no checkpoint.

        An explicit tag: that one or an error.  Else the one ``latest`` names if it is complete on every rank, else the
        newest of ours that is, saying what was skipped and why.  ``damaged``: tags that were tried already.
        """

        def known(found: list[catalog.Entry]) -> list[catalog.Entry]:
            return [e._replace(problem=str(damaged[e.tag])) if e.tag in damaged else e for e in found]

        peers = self._nvme_peers
        share = catalog.share_of(peers.rank, peers.world_size)
        if tag is not None:
            named: list[str] = peers.run(lambda: catalog.explicit(load_dir, tag), "choice of the checkpoint")
            peers.agree(named, "tag")
            return named[0]
        firsts = peers.run(lambda: catalog.latest(load_dir, share), "choice of the checkpoint")
        first = known(catalog.combine([[e] if e else [] for e in firsts]))
        if first and first[0].problem is None:
            return first[0].tag
        rest = known(
            catalog.combine(peers.run(lambda: catalog.others(load_dir, share), "choice of the checkpoint"))
        )
        good = next((e for e in rest if e.problem is None), None)
        if good is not None:
            named_first = {e.tag for e in first}
            skipped = [*first, *(e for e in rest[: rest.index(good)] if e.tag not in named_first)]
            skipped = [e for e in skipped if e.tag != good.tag]
            if peers.rank == 0:
                without = [rank for rank, entry in enumerate(firsts) if entry is None]
                log.warning(
                    "loading %s; skipped: %s",
                    good.tag,
                    "; ".join(f"{e.tag} ({e.problem})" for e in skipped)
                    or f"no {layout.LATEST} file on ranks {without}",
                )
            return good.tag
        for entry in [*first, *rest]:
            kind = CorruptError if peers.any((load_dir / entry.tag).is_dir()) else NoCheckpointError
            raise kind(
                f"no checkpoint in {load_dir} is complete: {entry.problem}",
                tag=entry.tag,
                path=str(load_dir / entry.tag),
                hint="name an older tag, if there is one",
            )
        return None

    def _mend(self, load_dir: Path, name: str, problem: CorruptError) -> bool:
        """Bring good parts from other nodes for those that are not what was saved; False: nothing came.  Collective."""
        peers, places = self._nvme_peers, self._nvme_saver.places
        try:
            came = supply(load_dir, name, peers, places, self._nvme_options, doubted=True)
        except (CorruptError, NoCheckpointError) as error:
            log.info("%s: no other node has a good copy: %s", load_dir / name, error)
            return False
        if came and peers.rank == 0:
            log.warning(
                "%s was damaged, and is mended by copies of other nodes: %s", load_dir / name, problem
            )
        return came

    def _stock_can_load(self, folder: Path) -> bool:
        """Leave the load to DeepSpeed: state it keeps on the accelerator alone, saved by itself."""
        if supported.restores_exactly(self):
            return False
        swapped = (folder / layout.SWAP).is_dir() or records.has_manifest(folder)
        saved_ranks = len(list(folder.glob("*_optim_states.pt")))
        return not swapped and saved_ranks == self._nvme_peers.world_size

    def _open(self, folder: Path, wanted: Wanted) -> Restore:
        """Check, copy and adopt what a checkpoint swaps; on an error everything is as it was, on every rank."""
        peers = self._nvme_peers
        box: list[Restore] = []

        def prepare() -> list[dict[str, Any]]:
            # They read files that this load may replace; what they find counts until it has.
            self._nvme_work.wait_for(self._nvme_checks or [])
            job = Restore(
                self, folder, self._nvme_options, peers.rank, peers.world_size, wanted, self._nvme_files
            )
            box.append(job)
            return job.prepare()

        try:
            needs = peers.run(prepare, "check of the checkpoint")
            room.refuse_too_little(needs, "the swap files of the checkpoint", tag=folder.name)
            peers.run(lambda: box[0].stage(show=peers.rank == 0), "check of the checkpoint")
        except NvmeResumeError:
            for job in box:
                job.discard()
            raise
        restore = box[0]

        def adopt() -> None:
            stock_loader.before(self)
            restore.adopt()

        try:
            peers.run(adopt, "restore of the weights")
        except BaseException as error:
            if isinstance(error, NvmeResumeError):
                restore.go_back()
            restore.discard()
            if isinstance(error, NvmeResumeError) and not isinstance(error, PeerError):
                stock_loader.after(self)
            raise
        return restore

    def _finish(self, restore: Restore, wanted: Wanted, custom_load_fn: Any) -> tuple[str | None, Any]:
        """The rest of the state, which nothing is known to be wrong with."""
        peers, folder = self._nvme_peers, restore.checkpoint.folder
        answer: list[tuple[Any, Any]] = []

        def apply() -> None:
            answer.append(stock_loader.load(self, folder, restore.saved_rank, wanted, custom_load_fn))
            restore.apply()
            restore.restore_rng()

        try:
            peers.run(apply, "restore")
        finally:
            restore.discard()
        stock_loader.after(self)
        self._nvme_work.drop(self._nvme_checks or [])
        self._verify_behind(restore)
        if peers.rank == 0:
            log.info(
                "resumed %s at step %d in %.2f s%s",
                folder,
                self.global_steps,
                restore.seconds(),
                restore.remark(),
            )
        return answer[0]

    def _verify_behind(self, restore: Restore) -> None:
        """Hash the files that were linked and not read, before the first step reads them; seal what has no seal."""
        checkpoint, options, gate = restore.checkpoint, self._nvme_options, self._nvme_work.gate
        checks: list[Task] = []

        def submit() -> bool:
            for public, check in restore.unverified().items():
                task = self._nvme_work.submit(
                    f"check of {public.name}", partial(check, gate), options.exit_seconds, awaited=True
                )
                self._nvme_files.check_first(public, partial(self._nvme_work.finish_these, task))
                checks.append(task)
            if checkpoint.ours:
                restore.seal_behind(self._nvme_work)
            return bool(checks)

        # A rank that could not link has copied and checked already; the wait in step() needs all or none.
        some = any(self._nvme_peers.run(submit, "end of the load"))
        self._nvme_checks = checks if some else None

    def _finish_checks(self) -> None:
        """Until the files adopted by the last load are verified.  Collective; raises as often as it is called."""
        checks = self._nvme_checks
        if checks is not None:
            self._nvme_peers.run(lambda: self._nvme_work.finish_these(*checks), "check of the resumed state")
            self._nvme_checks = None

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's ``step``; the first one after a load waits until the adopted files are verified."""
        self._finish_checks()
        self._nvme_saver.tell_monitors()
        return super().step(*args, **kwargs)  # type: ignore[misc]

    def destroy(self) -> None:
        """DeepSpeed's ``destroy``, after background work has ended."""
        self._nvme_work.close()
        self._nvme_saver.end()
        try:
            super().destroy()  # type: ignore[misc]
        finally:
            self._nvme_files.close()

    def _load_stock(
        self, load_dir: str, tag: str | int | None, name: str | None, wanted: Wanted, custom_load_fn: Any
    ) -> tuple[str | None, Any]:
        """DeepSpeed's own load, then the hidden state if we saved it beside."""
        rank = self._nvme_peers.rank
        box: list[manifest.Extras] = []

        def look() -> None:
            path = Path(load_dir) / str(name) / layout.extras(rank)
            if name is not None and not wanted.module_only and path.is_file():
                box.append(records.read(Path(load_dir) / name, layout.extras(rank), manifest.Extras))

        self._nvme_peers.run(look, "check of the hidden state")
        answer: tuple[str | None, Any] = super().load_checkpoint(  # type: ignore[misc]
            load_dir,
            tag=None if tag is None else str(tag),
            load_module_strict=wanted.strict,
            load_optimizer_states=wanted.optimizer_states,
            load_lr_scheduler_states=wanted.lr_scheduler_states,
            load_module_only=wanted.module_only,
            custom_load_fn=custom_load_fn,
        )

        def apply_hidden() -> None:
            for extras in box:
                self._restore_hidden_state(Path(load_dir) / str(name), extras, wanted)

        self._nvme_peers.run(apply_hidden, "restore of the hidden state")
        return answer

    def _restore_hidden_state(self, folder: Path, extras: manifest.Extras, wanted: Wanted) -> None:
        """What we saved beside a checkpoint that plain DeepSpeed wrote and loaded."""
        if wanted.optimizer_states:
            adam.restore(self, extras.adam)
            self.micro_steps = extras.micro_steps
        if wanted.rng:
            restore_rng_of(Checkpoint.beside_stock(folder, self, extras), self._nvme_peers.rank)
