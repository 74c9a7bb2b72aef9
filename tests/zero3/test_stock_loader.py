"""DeepSpeed's own collective at the end of a save or load speaks of a dead rank in our words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nvme_resume.errors import PeerError
from nvme_resume.zero3 import stock_loader


def engine_whose_gather_raises(error: Exception) -> Any:
    def gather() -> None:
        raise error

    optimizer = SimpleNamespace(checkpoint_event_epilogue=gather)
    return SimpleNamespace(optimizer=optimizer, _optimizer_has_ckpt_event_epilogue=lambda: True)


def test_a_rank_that_died_meanwhile_is_a_named_error() -> None:
    engine = engine_whose_gather_raises(RuntimeError("Connection closed by peer [127.0.0.1]:1"))
    with pytest.raises(PeerError, match="Connection closed by peer"):
        stock_loader.after(engine)


def test_too_little_memory_is_nobody_elses_fault() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        stock_loader.after(engine_whose_gather_raises(torch.OutOfMemoryError("no memory")))
