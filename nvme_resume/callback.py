"""``NvmeResumeCallback``: for those who like callbacks better than ``install()``."""

from __future__ import annotations

from typing import Any

from nvme_resume.huggingface.callback import SaveOnSigterm
from nvme_resume.installer import install


class NvmeResumeCallback(SaveOnSigterm):
    """``Trainer(..., callbacks=[NvmeResumeCallback()])``: the same as ``nvme_resume.install()`` before training.

    In time, because the Trainer initialises DeepSpeed in ``train()``.  ``save_on_sigterm``: as in ``SaveOnSigterm``.
    """

    def __init__(self, *, save_on_sigterm: bool = False) -> None:
        super().__init__()
        self._listens = save_on_sigterm
        install()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Listen for the signal, if that is wanted."""
        if self._listens:
            super().on_train_begin(args, state, control, **kwargs)
