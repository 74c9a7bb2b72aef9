"""Bring the swappers to rest, so that the swap files hold the state and nothing is in flight."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper import (
    ASYNC_SWAP_OUT,
    PipelinedOptimizerSwapper,
)

from nvme_resume.errors import UnsupportedError
from nvme_resume.manifest import Accumulation


def quiesce(engine: Any) -> None:
    """Complete pending optimizer and parameter writes of this rank."""
    optimizer = engine.optimizer
    swapper = getattr(optimizer, "optimizer_swapper", None)
    if swapper is not None:
        swapper.flush_gradients()
        if isinstance(swapper, PipelinedOptimizerSwapper) and swapper.swap_ops[ASYNC_SWAP_OUT] is not None:
            swapper._complete_swap_out(ASYNC_SWAP_OUT)
    param_swapper = param_swapper_of(engine)
    if param_swapper is not None:
        param_swapper.synchronize_writes()
        param_swapper.synchronize_reads()


def param_swapper_of(engine: Any) -> Any | None:
    """The swapper of 16-bit parameters on NVMe, or None."""
    if not getattr(engine.optimizer, "params_in_nvme_and_cpu", False):
        return None
    for param in engine.module.parameters():
        swapper = getattr(param, "nvme_swapper", None)
        if swapper is not None:
            return swapper
    return None


def accumulation(engine: Any) -> Accumulation | None:
    """The state of an open accumulation window, or None between windows.

    Raises UnsupportedError between ``backward()`` and ``step()`` of the last micro batch: the averaged
    gradients are then half way to the optimizer (``stage3.py::_offload_grad_partition_at_boundary``) and are
    not part of a checkpoint.
    """
    optimizer = engine.optimizer
    if getattr(optimizer, "norm_for_param_grads", None):
        raise UnsupportedError(
            "a save between backward() and step() of an optimizer step would drop its gradients",
            hint="call save_checkpoint() after engine.step()",
        )
    if (
        optimizer._epilogue_ran_this_backward
        and engine.managed_gradient_accumulation()
        and engine._is_gradient_accumulation_boundary is None
        and engine.micro_steps % engine.gradient_accumulation_steps() == optimizer.micro_step_id
    ):
        # backward() has counted this micro batch in the optimizer, step() has not counted it in the engine yet.
        raise UnsupportedError(
            "a save between backward() and step() of a micro batch would count it twice on resume",
            hint="call save_checkpoint() after engine.step()",
        )
    if not optimizer.micro_step_id and not optimizer._epilogue_ran_this_backward:
        return None
    names = {param.ds_id: engine.param_names[param] for group in optimizer.fp16_groups for param in group}
    return Accumulation(
        micro_step_id=optimizer.micro_step_id,
        epilogue_ran=bool(optimizer._epilogue_ran_this_backward),
        active_params=tuple(sorted(names[i] for i in optimizer._offload_boundary_param_ids if i in names)),
    )
