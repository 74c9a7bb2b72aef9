"""Everything that ``install()`` changes in Hugging Face's libraries, and for which versions that was tested.

==========================================  ==========================================================================
``Trainer._save_checkpoint``                builds ``checkpoint-N`` aside and publishes it (``trainer.save``)
``TrainingArguments.should_save``           while that goes on: one process a file system says yes
``PartialState.wait_for_everyone``          nothing where 4.38's ``_save_checkpoint`` guards renames with it (but FSDP)
``trainer.dist.barrier``                    nothing while that goes on (5.24 waits for the best one's folder; but FSDP)
``JITCheckpointCallback``                   ``SaveOnSigterm``: theirs saves within a step, each rank for itself
``upload_folder``                           leaves out what is ours: staging folders, lock and owner
``should_save_on_this_rank`` of models       while that goes on: the same answer (5.24 writes no weights on other nodes)
``get_last_checkpoint`` (``trainer_utils``)  the newest complete folder, as this process sees it
``get_last_checkpoint`` (``trainer``)        the same, agreed by all ranks (``resume_from_checkpoint=True``)
``trainer.shutil.rmtree``                   a checkpoint folder goes in one rename (``load_best_model_at_end``, limit 1)
``trainer.DEFAULT_CALLBACKS``               one more, if ``save_on_sigterm`` was asked for
==========================================  ==========================================================================

Nothing is patched before ``transformers.trainer`` is imported by somebody, and nothing without ``install()``.  wrapt
does the patching: it keeps signatures, can hook an import that comes later, and its wrappers can be taken off again.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import wrapt

from nvme_resume import layout, logs
from nvme_resume.huggingface import choice, rotation, trainer
from nvme_resume.huggingface.folders import TIMEOUT_SECONDS
from nvme_resume.peers import shared
from nvme_resume.storage import prune

log = logs.logger

TESTED_TRANSFORMERS = ("4.38.2", "5.24.0")

_WRITES = "should_save_on_this_rank"
_WAITS = "wait_for_everyone"
_callers: set[types.CodeType] = set()  # whose waiting is not needed

_undo: list[Callable[[], None]] = []
_state = {"wanted": False, "hooked": False, "sigterm": False}


def install(*, save_on_sigterm: bool = False) -> None:
    """Patch ``transformers.trainer`` now, or when it is imported.  Harmless to repeat."""
    _state["wanted"] = True
    _state["sigterm"] = _state["sigterm"] or save_on_sigterm
    module = sys.modules.get("transformers.trainer")
    if module is not None and hasattr(module, "Trainer"):
        _patch(module)
    elif not _state["hooked"]:
        _state["hooked"] = True
        wrapt.register_post_import_hook(_patch, "transformers.trainer")


def uninstall() -> None:
    """Undo ``install``."""
    _state.update(wanted=False, sigterm=False)
    while _undo:
        _undo.pop()()


def _patch(module: Any) -> None:
    if not _state["wanted"]:
        return
    if _undo:
        _listen(module)  # asked for by a later install()
        return
    version = importlib.metadata.version("transformers")
    kind = module.Trainer
    arguments = module.TrainingArguments
    missing = [
        f"{owner.__name__}.{name}"
        for owner, name in [(kind, "_save_checkpoint"), (kind, "_get_output_dir"), (kind, "_push_from_checkpoint"),
                            (arguments, "should_save"), (module, "get_last_checkpoint")]
        if not hasattr(owner, name)
    ]  # fmt: skip
    if missing:
        log.warning(
            "transformers %s has no %s: its checkpoint folders are left as they are (tested: %s)",
            version,
            ", ".join(missing),
            ", ".join(TESTED_TRANSFORMERS),
        )
        return
    if version not in TESTED_TRANSFORMERS:
        log.warning(
            "transformers %s is not one nvme_resume was tested with (%s)",
            version,
            ", ".join(TESTED_TRANSFORMERS),
        )
    _replace(kind, "_save_checkpoint", wrapt.FunctionWrapper(kind._save_checkpoint, _save))
    original = arguments.should_save
    _replace(
        arguments, "should_save", property(lambda args: trainer.is_publisher(lambda: original.fget(args)))
    )
    state = sys.modules.get("accelerate.state")
    code = kind._save_checkpoint.__wrapped__.__code__
    if state is not None and _WAITS in code.co_names:
        _callers.add(code)
        _replace(
            state.PartialState, _WAITS, wrapt.FunctionWrapper(state.PartialState.wait_for_everyone, _wait)
        )
    if hasattr(module, "dist"):
        _replace(module, "dist", _Distributed(module.dist))
    _patch_signals(module)
    _patch_uploads(module)
    for owner in module.PreTrainedModel.__mro__ if hasattr(module, "PreTrainedModel") else ():
        if _WRITES in vars(owner):
            _replace(owner, _WRITES, wrapt.FunctionWrapper(vars(owner)[_WRITES], _writes))
    utilities = sys.modules["transformers.trainer_utils"]
    _replace(utilities, "get_last_checkpoint", wrapt.FunctionWrapper(utilities.get_last_checkpoint, _newest))
    _replace(module, "get_last_checkpoint", wrapt.FunctionWrapper(module.get_last_checkpoint, _agreed))
    _replace(module, "shutil", types.SimpleNamespace(**{**vars(shutil), "rmtree": _remove}))


class _Distributed:
    """``torch.distributed`` as the Trainer sees it."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def barrier(self, *args: Any, **kwargs: Any) -> Any:
        return trainer.waits(self._module.barrier, args, kwargs)


def _listen(module: Any) -> None:
    from nvme_resume.huggingface.callback import SaveOnSigterm  # needs transformers, which is there now

    present = getattr(module, "DEFAULT_CALLBACKS", None)
    if _state["sigterm"] and present is not None and SaveOnSigterm not in present:
        _replace(module, "DEFAULT_CALLBACKS", [*present, SaveOnSigterm])


def _patch_signals(module: Any) -> None:
    from nvme_resume.huggingface.callback import SaveOnSigterm

    _listen(module)
    with contextlib.suppress(ImportError):
        just_in_time = importlib.import_module("transformers.trainer_jit_checkpoint")
        _replace(just_in_time, "JITCheckpointCallback", SaveOnSigterm)


def _patch_uploads(module: Any) -> None:
    """Both as 4.38.2 (a function) and as 5.24.0 (a method of an object that a function makes) have it."""
    if hasattr(module, "upload_folder"):
        _replace(module, "upload_folder", wrapt.FunctionWrapper(module.upload_folder, _upload))
    elif hasattr(module, "hf_api"):

        def api(original: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            made: Any = wrapt.ObjectProxy(original(*args, **kwargs))
            made.upload_folder = wrapt.FunctionWrapper(made.__wrapped__.upload_folder, _upload)
            return made

        _replace(module, "hf_api", wrapt.FunctionWrapper(module.hf_api, api))


def _upload(original: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    ignored = kwargs.get("ignore_patterns") or []
    ignored = [ignored] if isinstance(ignored, str) else list(ignored)
    ours = [f"{layout.STAGING_PREFIX}*", f"{layout.RETIRED_PREFIX}*", layout.WRITER_LOCK, layout.WRITER_NOTE]
    patterns = [p for name in ours for p in (name, f"*/{name}")]
    return original(*args, **{**kwargs, "ignore_patterns": [*ignored, *patterns]})


def _replace(owner: Any, name: str, value: Any) -> None:
    before = vars(owner)[name]
    _undo.append(lambda: setattr(owner, name, before))
    setattr(owner, name, value)


def _save(original: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return trainer.save(original, instance, args, kwargs)


def _writes(original: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return trainer.writes_weights(original, args, kwargs)


def _wait(original: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    caller: types.FrameType | None = sys._getframe(1)
    while caller is not None and caller.f_globals.get("__name__", "").startswith("wrapt"):
        caller = caller.f_back
    mine = caller is not None and caller.f_code in _callers
    return trainer.waits(original, args, kwargs) if mine else original(*args, **kwargs)


def _newest(original: Any, instance: Any, args: Any, kwargs: Any) -> str | None:
    return _text(choice.newest(Path(args[0] if args else kwargs["folder"])))


def _agreed(original: Any, instance: Any, args: Any, kwargs: Any) -> str | None:
    return _text(choice.newest_of_all(Path(args[0] if args else kwargs["folder"]), shared(TIMEOUT_SECONDS)))


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _remove(path: Any, ignore_errors: bool = False, *args: Any, **kwargs: Any) -> None:
    """``shutil.rmtree`` as the Trainer calls it."""
    folder = Path(path)
    if rotation.step_of(folder.name) is None or not folder.is_dir():
        shutil.rmtree(path, ignore_errors, *args, **kwargs)
        return
    if trainer.to_resume_from(folder):
        return
    try:
        prune.remove(folder.parent, folder.name)
    except FileNotFoundError:  # another rank was faster
        return
    except OSError:
        if not ignore_errors:
            raise
