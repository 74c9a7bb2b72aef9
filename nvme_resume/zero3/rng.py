"""Random states of a training process: python, numpy, torch CPU, accelerator, DeepSpeed's checkpointing tracker.

Plain values go into JSON, byte tensors into safetensors; nothing is pickled.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

_TORCH, _ACCELERATOR, _TRACKER = "rng.torch", "rng.accelerator", "rng.tracker."


def capture() -> tuple[list[Any], dict[str, Any], dict[str, torch.Tensor]]:
    """(python state, numpy state, byte tensors); every value is JSON or a uint8 CPU tensor."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    tensors = {_TORCH: torch.get_rng_state().clone()}
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        tensors[_ACCELERATOR] = accelerator.get_rng_state().cpu().clone()
    for name, state in get_cuda_rng_tracker().get_states().items():
        tensors[_TRACKER + name] = state.cpu().clone()
    return (
        [version, list(words), gauss],
        {
            "bit_generator": numpy_state["bit_generator"],
            "key": numpy_state["state"]["key"].tolist(),
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        tensors,
    )


def restore(python: list[Any], numpy_state: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Set all random states of this process to what ``capture`` returned."""
    random.setstate((python[0], tuple(python[1]), python[2]))
    np.random.set_state(
        {
            "bit_generator": numpy_state["bit_generator"],
            "state": {"key": np.array(numpy_state["key"], dtype=np.uint32), "pos": numpy_state["pos"]},
            "has_gauss": numpy_state["has_gauss"],
            "gauss": numpy_state["gauss"],
        }
    )
    torch.set_rng_state(tensors[_TORCH])
    accelerator = get_accelerator()
    if _ACCELERATOR in tensors and accelerator.device_name() != "cpu":
        accelerator.set_rng_state(tensors[_ACCELERATOR])
    tracker = get_cuda_rng_tracker()
    states = {n.removeprefix(_TRACKER): s for n, s in tensors.items() if n.startswith(_TRACKER)}
    if states:
        tracker.set_states(states)
