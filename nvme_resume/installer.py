"""``install()``: make ``deepspeed.initialize`` return wrapped engines where the configuration asks for it.

Engines whose configuration lacks ``"nvme_checkpoint"`` come back exactly as before.  Of DeepSpeed only the function
``deepspeed.initialize`` is patched; what changes in Hugging Face's libraries is listed in ``huggingface.patches``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch.distributed as dist

from nvme_resume import config, ops
from nvme_resume.engine import NvmeResumeEngine
from nvme_resume.errors import LockedError
from nvme_resume.huggingface import patches
from nvme_resume.peers import Peers
from nvme_resume.storage import locks, snapshot
from nvme_resume.zero3 import supported

_MARK = "_nvme_resume_original"


def install(*, save_on_sigterm: bool = False) -> None:
    """Patch ``deepspeed.initialize`` and, where it is used, Hugging Face's Trainer.  Harmless to repeat.

    ``save_on_sigterm``: every Trainer saves at the end of the step in which a rank was told to end, then stops.
    """
    patches.install(save_on_sigterm=save_on_sigterm)
    original = deepspeed.initialize
    if hasattr(original, _MARK):
        return
    ops.warn_stale_locks()

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as claims:
            for lock in _claim(original, args, kwargs):
                claims.callback(lock.close)
            engine, *rest = original(*args, **kwargs)
            if config.parse(engine.config.get(config.KEY)) is not None:
                engine = NvmeResumeEngine.wrap(engine)
            return (engine, *rest)

    setattr(initialize, _MARK, original)
    deepspeed.initialize = initialize


def uninstall() -> None:
    """Undo ``install``."""
    patches.uninstall()
    deepspeed.initialize = getattr(deepspeed.initialize, _MARK, deepspeed.initialize)


def _claim(original: Callable[..., Any], args: Any, kwargs: Any) -> list[locks.Lock]:
    """Own the swap folders before DeepSpeed writes there.  LockedError, on all ranks if they know each other yet."""
    settings = _settings(original, args, kwargs)
    options = config.parse(settings.get(config.KEY))
    if options is None:
        return []
    started = dist.is_available() and dist.is_initialized()
    rank = dist.get_rank() if started else int(os.environ.get("RANK", "0"))
    claims: list[locks.Lock] = []

    def claim() -> None:
        for folder in supported.swap_folders(settings, rank):
            # What else may be wrong with the folder is DeepSpeed's to say.
            with contextlib.suppress(OSError):
                claims.append(snapshot.claim(folder))

    try:
        if started:
            Peers(options.timeout_seconds).run(claim, "start")
        else:
            claim()
    except LockedError:
        for lock in claims:
            lock.close()
        raise
    return claims


def _settings(original: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """The configuration in a call of ``deepspeed.initialize``; empty where it is in no form we know."""
    try:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
    except TypeError:
        return {}
    value = given.get("config") or given.get("config_params")
    value = value or getattr(given.get("args"), "deepspeed_config", None)
    if isinstance(value, (str, os.PathLike)):
        try:
            value = json.loads(Path(value).read_bytes())
        except (OSError, ValueError):
            return {}
    return value if isinstance(value, dict) else {}
