"""A save when the machine is about to be taken away."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from transformers import TrainerCallback

from nvme_resume import logs
from nvme_resume.huggingface.folders import TIMEOUT_SECONDS
from nvme_resume.peers import Peers

log = logs.logger


class SaveOnSigterm(TrainerCallback):  # type: ignore[misc]
    """When any rank gets SIGTERM, all save at the end of the step and training stops.

    Costs one all-reduce of a byte a step, on a gloo group of its own.  The signal is not passed on to a handler that
    was there before, and means what it did before when training has ended.
    """

    def __init__(self) -> None:
        self._told = False
        self._before: Any = None
        self._peers: Peers | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Listen for the signal."""
        logs.ensure_visible()
        self._peers = Peers(TIMEOUT_SECONDS)
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._tell)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask the other ranks."""
        if self._peers is not None and self._peers.any(self._told):
            if self._peers.rank == 0:
                log.info("SIGTERM: saving at step %d, then training stops", state.global_step)
            control.should_save = True
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The signal means what it did before."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _tell(self, number: int, frame: FrameType | None) -> None:
        self._told = True
