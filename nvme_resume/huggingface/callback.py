"""A save when the machine is about to be taken away."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from nvme_resume import logs
from nvme_resume.huggingface.folders import TIMEOUT_SECONDS
from nvme_resume.huggingface.sigterm import listener
from nvme_resume.peers import Peers, shared

log = logs.logger


class SaveOnSigterm(TrainerCallback):  # type: ignore[misc]
    """When any rank gets SIGTERM, all save at the end of the step and training stops.

    Costs one all-reduce of a byte a step, on a gloo group of its own.  The first signal is not passed on to a handler
    that was there before; a second one is, and so are those that come when training has ended.
    """

    def __init__(self) -> None:
        self._peers: Peers | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Listen for the signal."""
        logs.ensure_visible()
        if self._peers is None:
            listener.start()
        self._peers = shared(TIMEOUT_SECONDS)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask the other ranks."""
        if self._peers is not None and self._peers.any(listener.heard):
            listener.heard = True
            if self._peers.rank == 0:
                log.info("SIGTERM: saving at step %d, then training stops", state.global_step)
            control.should_evaluate = False  # it would decide anew whether to save
            control.should_save = True
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The signal means what it did before."""
        if self._peers is not None:
            self._peers = None
            listener.stop()

    def set_trainer(self, trainer: Any) -> None:
        """What the Trainer calls on the just-in-time callback that this one takes the place of."""
