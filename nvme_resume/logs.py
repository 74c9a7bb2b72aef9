"""The package's own logger, ``nvme_resume``.

Python shows only warnings of loggers that nobody configured.  A training script that prints a loss a second should
also say where its checkpoint went, so where nobody configured logging we show our few lines ourselves.
"""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("nvme_resume")


def ensure_visible() -> None:
    """Let INFO lines reach the program's handlers, or stderr where it has none; a level set for us stays."""
    if logger.level != logging.NOTSET:
        return
    root = logging.getLogger()
    if any(handler.level <= logging.INFO for handler in root.handlers):
        # Some library's first warning sets up a handler for everything and leaves the level at WARNING.
        logger.setLevel(logging.INFO)
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [nvme_resume] %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
