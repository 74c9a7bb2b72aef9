"""A ZeRO-3 engine on NVMe with a given amount of swapped state, and the training step that is timed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import deepspeed
import torch

from nvme_resume import NvmeResumeEngine

WIDTH = 2048
SUB_GROUP = 100_000_000  # parameters; DeepSpeed's default is 1e9
BYTES_EACH = 12  # master, exp_avg, exp_avg_sq


class Stack(torch.nn.Module):
    """Square linear layers, one after the other."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A scalar loss."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return (x.float() ** 2).mean()


def build(gigabytes: float, nvme_path: Path, options: dict[str, Any] | None = None) -> Any:
    """A wrapped engine whose swap files hold about ``gigabytes`` (1e9 bytes)."""
    layers = max(1, round(gigabytes * 1e9 / BYTES_EACH / WIDTH**2))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": SUB_GROUP,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": str(nvme_path),
                "buffer_count": 5,
                "pin_memory": False,
            },
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 16, "intra_op_parallelism": 1, "overlap_events": True},
        "steps_per_print": 10**9,
        "nvme_checkpoint": options or True,
    }
    torch.manual_seed(1)
    engine, *_ = deepspeed.initialize(model=Stack(layers), config=config)
    return NvmeResumeEngine.wrap(engine)


def step(engine: Any) -> float:
    """Seconds of one whole training step."""
    start = time.perf_counter()
    loss = engine(torch.ones(1, WIDTH, dtype=torch.bfloat16))
    engine.backward(loss)
    engine.step()
    return time.perf_counter() - start
