"""The signal that says a machine is about to be taken away: one listener for all Trainers of a process."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any


class Listener:
    """Notes SIGTERM while somebody listens.  The second signal means what it did before: nobody answered the first."""

    def __init__(self) -> None:
        self.heard = False
        self._listeners = 0
        self._before: Any = None

    def start(self) -> None:
        """Listen, from the main thread; elsewhere signals cannot be heard."""
        if self._listeners == 0:
            self.heard = False
            if threading.current_thread() is threading.main_thread():
                self._before = signal.signal(signal.SIGTERM, self._hear)
        self._listeners += 1

    def stop(self) -> None:
        """With the last listener the signal means what it did before."""
        self._listeners = max(0, self._listeners - 1)
        if self._listeners == 0:
            self._give_back()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.heard:
            self._give_back()
            os.kill(os.getpid(), number)
        self.heard = True

    def _give_back(self) -> None:
        # Somebody who put a handler of their own over ours keeps it.
        if self._before is not None and signal.getsignal(signal.SIGTERM) == self._hear:
            signal.signal(signal.SIGTERM, self._before)
        self._before = None


listener = Listener()
