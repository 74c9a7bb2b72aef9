"""A bandwidth limit for what does not go through the native copier, which has its own."""

from __future__ import annotations

import threading
import time

from nvme_resume.storage.background import Gate


class Limit:
    """At most that many bytes a second, over all transfers that share it; 0: no limit."""

    def __init__(self, mib_per_second: float) -> None:
        self._rate = mib_per_second * (1 << 20)
        self._free_at = time.monotonic()
        self._mutex = threading.Lock()

    def spend(self, nbytes: int, gate: Gate) -> None:
        """Wait until so much may go."""
        if not self._rate:
            return
        with self._mutex:
            mine = self._free_at = max(self._free_at, time.monotonic()) + nbytes / self._rate
        while (left := mine - time.monotonic()) > 0:
            gate.check()
            time.sleep(min(left, 0.1))
