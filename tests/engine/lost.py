"""A disk at one call of which the process is lost: it dies, or hangs as on a server that does not answer."""

from __future__ import annotations

import os
import time
from typing import Any

from nvme_resume.storage import disk as seam

HANGS_SECONDS = 40


class LosingDisk(seam.Disk):
    """``how`` is ``"dies"`` or ``"hangs"``; ``where`` the method."""

    def __init__(self, how: str, where: str) -> None:
        self.how = how
        self.where = where

    def __getattribute__(self, name: str) -> Any:
        if name in ("how", "where") or name != self.where:
            return super().__getattribute__(name)
        if self.how == "dies":
            os._exit(9)
        time.sleep(HANGS_SECONDS)
        os._exit(0)
