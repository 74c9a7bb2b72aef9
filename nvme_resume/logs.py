"""The package's own logger, ``nvme_resume``.

Python shows only warnings of loggers that nobody configured.  A training script that prints a loss a second should
also say where its checkpoint went, so where nobody configured logging we show our few lines ourselves.
"""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("nvme_resume")


def ensure_visible() -> None:
    """Let INFO lines reach stderr unless the program has set up logging for us or for everything."""
    if logger.level != logging.NOTSET or logger.hasHandlers():
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [nvme_resume] %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
