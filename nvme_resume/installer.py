"""``install()``: make ``deepspeed.initialize`` return wrapped engines where the configuration asks for it.

The one thing patched is the function ``deepspeed.initialize``; engines whose configuration lacks
``"nvme_checkpoint"`` come back exactly as before.
"""

from __future__ import annotations

import functools
from typing import Any

import deepspeed

from nvme_resume import config, ops
from nvme_resume.engine import NvmeResumeEngine

_MARK = "_nvme_resume_original"


def install() -> None:
    """Patch ``deepspeed.initialize``.  Harmless to repeat."""
    original = deepspeed.initialize
    if hasattr(original, _MARK):
        return
    ops.warn_stale_locks()

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        engine, *rest = original(*args, **kwargs)
        if config.parse(engine.config.get(config.KEY)) is not None:
            engine = NvmeResumeEngine.wrap(engine)
        return (engine, *rest)

    setattr(initialize, _MARK, original)
    deepspeed.initialize = initialize


def uninstall() -> None:
    """Undo ``install``."""
    deepspeed.initialize = getattr(deepspeed.initialize, _MARK, deepspeed.initialize)
