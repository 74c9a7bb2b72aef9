"""Small workloads for the check's own tests, through the same protocol that users have."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import torch

WIDTH = 768


class Net(torch.nn.Module):
    """Matrices large enough to be swapped even in 16 bit, norms that stay in memory, a buffer, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = torch.nn.LayerNorm(WIDTH)
        torch.nn.init.normal_(self.norm.weight, std=0.1)  # from 1.0 a small step is rounded away in bf16
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls.add_(1)
        x = x.to(self.norm.weight.dtype)
        for layer in self.layers:
            x = x + torch.nn.functional.dropout(torch.tanh(layer(self.norm(x))), 0.1, self.training)
        return {"loss": (x.float() ** 2).mean()}


class Matrices:
    """``parameters`` instead of groups."""

    def __init__(self, rank: int, seed: int) -> None:
        self.rank = rank
        torch.manual_seed(seed)
        self.model: torch.nn.Module = Net()
        self.parameters = self.model.parameters

    def batches(self, step: int) -> Iterator[dict[str, Any]]:
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        while True:
            yield {"x": torch.randn(2, WIDTH, generator=generator)}


def build(rank: int, world_size: int, seed: int) -> Matrices:
    return Matrices(rank, seed)


def build_dying(rank: int, world_size: int, seed: int) -> Matrices:
    """The last rank is killed before it has built anything, the others wait for it."""
    if rank == world_size - 1:
        print("about to die", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
    return build(rank, world_size, seed)


def build_silent(rank: int, world_size: int, seed: int) -> Matrices:
    """Nobody fails, nobody goes on."""
    time.sleep(600)
    return build(rank, world_size, seed)
