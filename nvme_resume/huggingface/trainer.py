"""The one module that knows the Trainer's insides: how its ``_save_checkpoint`` is led into a staging folder.

The Trainer's own code writes every file (transformers 5.24.0 and 4.38.2, ``trainer.py::Trainer._save_checkpoint``); it
is only told another output folder, and what it would rename, remove or upload is done by us, after the commit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvme_resume import config, logs
from nvme_resume.engine import NvmeResumeEngine
from nvme_resume.errors import NvmeResumeError
from nvme_resume.huggingface import rotation
from nvme_resume.huggingface.folders import Building, Folders
from nvme_resume.huggingface.sigterm import listener
from nvme_resume.storage import catalog

log = logs.logger

_FOLDERS = "_nvme_resume_folders"  # on a Trainer
_STATE = "trainer_state.json"


@dataclass(frozen=True)
class Saving:
    """A Trainer of this process is writing a checkpoint.

    ``barriers``: whether those of the Trainer's own save are needed (FSDP's shards).  Else they guard renames that do
    not happen here, and a rank that failed would not come to them.  ``whole``: does every rank have all weights?
    """

    publisher: bool
    barriers: bool
    whole: bool


saving: list[Saving] = []
_newest: list[Path] = []  # what this process committed last


def save(original: Callable[..., Any], trainer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``Trainer._save_checkpoint``, whole or not at all.  Collective.

    Raises the same NvmeResumeError on every rank when any failed; then no folder has changed.
    """
    start = time.monotonic()
    folders = folders_of(trainer)
    trial = kwargs.get("trial", args[1] if len(args) > 1 else None)
    written = str(trainer._get_output_dir(trial=trial))  # as the user wrote it
    run_dir = Path(os.path.abspath(written))  # noqa: PTH100 - links stay links
    best = trainer.state.best_model_checkpoint
    name = f"checkpoint-{trainer.state.global_step}"
    uploads: list[Callable[[], Any]] = []
    with folders.building(run_dir, name, written) as building:

        def write() -> None:
            try:
                with _led_to(trainer, building, uploads):
                    original(*args, **kwargs)
            except Exception as error:
                # The others may be in a collective of their own meanwhile: say now what they will not hear of soon.
                log.error(  # noqa: TRY400 - it is raised, with its trace
                    "rank %d: %s could not be written: %s", folders.peers.rank, name, error
                )
                raise

        try:
            with _engine_inside(trainer):
                building.run(write, f"save of {name}")
            building.run(lambda: _finish_state(trainer, building, written), f"save of {name}")
            nbytes = building.publish()
        except BaseException:
            trainer.state.best_model_checkpoint = best
            raise
    _newest[:] = [building.final]
    for engine in _engines(trainer):
        engine.committed_as(building.final)
    removed = _rotate(trainer, building)
    if folders.peers.rank == 0:
        log.info(
            "committed %s: step %d, %.1f MiB in %.2f s%s",
            building.final,
            trainer.state.global_step,
            nbytes / (1 << 20),
            time.monotonic() - start,
            f"; removed {', '.join(removed)}" if removed else "",
        )
    for upload in uploads:
        upload()


def folders_of(trainer: Any) -> Folders:
    """What this rank knows of the Trainer's folders.  Collective the first time."""
    found: Folders | None = trainer.__dict__.get(_FOLDERS)
    if found is None:
        logs.ensure_visible()
        options = _options(trainer)
        found = Folders() if options is None else Folders(options.timeout_seconds)
        trainer.__dict__[_FOLDERS] = found
    return found


def is_publisher(original: Callable[[], bool]) -> bool:
    """``TrainingArguments.should_save``; while a checkpoint is built, whether this rank publishes it."""
    return saving[-1].publisher if saving else original()


def to_resume_from(folder: Path) -> bool:
    """Is it the checkpoint that was saved because the machine is taken away?  Nothing may remove that one."""
    return listener.heard and bool(_newest) and folder.resolve() == _newest[0].resolve()


def waits(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A barrier; nothing while a checkpoint is built that does without."""
    return original(*args, **kwargs) if not saving or saving[-1].barriers else None


def writes_weights(original: Callable[..., bool], args: Any, kwargs: Any) -> bool:
    """``should_save_on_this_rank``, which knows of one node only (5.24.0): every publisher has to write them."""
    return saving[-1].publisher if saving and saving[-1].whole else original(*args, **kwargs)


def _options(trainer: Any) -> config.Options | None:
    plugin = getattr(trainer.args, "hf_deepspeed_config", None)
    return None if plugin is None else config.parse(plugin.config.get(config.KEY))


@contextlib.contextmanager
def _led_to(trainer: Any, building: Building, uploads: list[Callable[[], Any]]) -> Iterator[None]:
    """While the Trainer writes: into the staging folder, no renames, no uploads."""
    push = trainer._push_from_checkpoint
    shadows: list[tuple[Any, str, Any]] = [
        (trainer, "_get_output_dir", lambda trial=None: str(building.staging)),
        (trainer, "_push_from_checkpoint", lambda folder: uploads.append(lambda: push(str(building.final)))),
    ]
    noise = logging.getLogger("transformers.trainer")
    with contextlib.ExitStack() as undo:
        for target, name, value in shadows:
            undo.enter_context(_shadowed(target, name, value))
        noise.addFilter(_no_fuss_about_the_folder)
        undo.callback(noise.removeFilter, _no_fuss_about_the_folder)
        whole = not (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled)
        saving.append(Saving(building.publisher, barriers=trainer.is_fsdp_enabled, whole=whole))
        undo.callback(saving.pop)
        yield


@contextlib.contextmanager
def _shadowed(target: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of one object has another value for a while."""
    names = target.__dict__
    there, before = name in names, names.get(name)
    names[name] = value
    try:
        yield
    finally:
        if there:
            names[name] = before
        else:
            del names[name]


def _no_fuss_about_the_folder(record: logging.LogRecord) -> bool:
    """transformers 4.38 warns of a destination that is not empty; ours never is."""
    return "already exists and is non-empty" not in str(record.msg)


def _engine_inside(trainer: Any) -> contextlib.AbstractContextManager[None]:
    """What an engine of ours saves meanwhile is a part of this checkpoint."""
    for engine in _engines(trainer):
        return engine.inside_larger_checkpoint()
    return contextlib.nullcontext()


def _engines(trainer: Any) -> list[NvmeResumeEngine]:
    """The engine of ours, if there is one."""
    found = (getattr(trainer, "deepspeed", None), getattr(trainer, "model_wrapped", None))
    return [engine for engine in found if isinstance(engine, NvmeResumeEngine)][:1]


def _finish_state(trainer: Any, building: Building, run_dir: str) -> None:
    """``trainer_state.json`` names the best model by its final path."""
    state = trainer.state
    best = getattr(state, "best_global_step", None)
    named = state.best_model_checkpoint
    if named is not None and building.staging in Path(named).parents:
        state.best_model_checkpoint = os.path.join(run_dir, Path(named).name)  # noqa: PTH118 - as the Trainer does
    elif best:  # newer transformers look for its folder where they save
        folder = building.run_dir / f"checkpoint-{best}"
        if folder == building.final or folder.is_dir():
            state.best_model_checkpoint = os.path.join(run_dir, folder.name)  # noqa: PTH118
    building.is_written(_STATE)
    if building.publisher and (building.folder / _STATE).exists():
        state.save_to_json(str(building.folder / _STATE))


def _rotate(trainer: Any, building: Building) -> list[str]:
    """``save_total_limit``.  A failure is not worth an error: the new checkpoint is committed."""
    best = trainer.state.best_model_checkpoint
    protected = [building.final.name, *([] if best is None else [Path(best).name])]
    try:
        there = [p.name for p in building.run_dir.iterdir() if p.is_dir()]
        going = rotation.outdated(there, trainer.args.save_total_limit, protected)
        # What is on its way to another node goes with the next rotation.
        going = [name for name in going if not catalog.is_used(building.run_dir / name)]
        building.remove(going)
    except (OSError, NvmeResumeError) as error:
        log.warning("older checkpoints in %s could not be removed: %s", building.run_dir, error)
        return []
    return going if building.publisher else []
