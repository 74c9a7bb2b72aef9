"""Which engines exact resume is known for, and which settings DeepSpeed itself cannot survive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from nvme_resume import config, layout, logs, plan
from nvme_resume.errors import ConfigError, UnsupportedError
from nvme_resume.zero3 import layout_of

TESTED_DEEPSPEED = ("0.19.8",)

# Flat tensors that each optimizer keeps for a parameter beside its master weights.
_STATES = {
    "DeepSpeedCPUAdam": 2,
    "DeepSpeedCPULion": 2,
    "DeepSpeedCPUAdagrad": 1,
    "MuonWithAuxAdam": 2,
    "Adam": 2,
    "AdamW": 2,
}


def version() -> str:
    """The installed DeepSpeed version."""
    return str(deepspeed.__version__)


def is_engine(engine: object) -> bool:
    """True for a live DeepSpeed engine."""
    return isinstance(engine, DeepSpeedEngine)


def is_zero3(engine: Any) -> bool:
    """True when the engine's optimizer is plain ZeRO-3 (not SuperOffload or another subclass)."""
    return type(engine.optimizer) is DeepSpeedZeroOptimizer_Stage3


def uses_nvme(engine: Any) -> bool:
    """True when optimizer state or parameters of this engine live in swap files."""
    optimizer = engine.optimizer
    return bool(
        getattr(optimizer, "swap_optimizer", False) or getattr(optimizer, "params_in_nvme_and_cpu", False)
    )


def swap_folders(settings: dict[str, Any], rank: int) -> list[Path]:
    """Where an engine of this configuration would swap, known before it is made.

    DeepSpeed 0.19.8: ``<nvme_path>/zero_stage_3/<what>/rank<global rank>``; all <what> of a rank have one lock.
    """
    return [layout.swap_folder(path, rank) for path in config.nvme_paths(settings)]


def restores_exactly(engine: Any) -> bool:
    """True for engines that our own restore serves: optimizer state offloaded, to NVMe or CPU memory.

    With CPU memory DeepSpeed's own loader comes close but changes what it loads: torch casts Muon's 16-bit
    momentum to fp32, Lion's groups gain a key (0.19.8).
    """
    optimizer = engine.optimizer
    if uses_nvme(engine):
        return True
    return bool(
        is_zero3(engine)
        and optimizer.offload_optimizer
        and not getattr(optimizer, "zenflow", False)
        and optimizer.partial_offload == 1.0
        and not engine.has_moe_layers
        and engine.mp_world_size == 1
    )


def refuse_unsupported(engine: Any) -> None:
    """UnsupportedError for NVMe engines whose state this package does not know completely."""
    if not uses_nvme(engine):
        return
    optimizer = engine.optimizer
    if not is_zero3(engine):
        raise UnsupportedError(
            "exact resume with NVMe offload is known for plain ZeRO-3 only",
            expected="DeepSpeedZeroOptimizer_Stage3",
            found=type(optimizer).__name__,
            hint='switch "super_offload" off, or leave "nvme_checkpoint" out',
        )
    if getattr(optimizer, "zenflow", False):
        raise UnsupportedError(
            "ZenFlow keeps state that is not saved", hint='remove "zenflow" from the configuration'
        )
    if optimizer.partial_offload != 1.0:
        raise UnsupportedError(
            "with a partial offload ratio part of the state is in a second optimizer that is not saved",
            expected='"ratio": 1.0',
            found=f'"ratio": {optimizer.partial_offload}',
            hint='set "offload_optimizer": {"ratio": 1.0}',
        )
    if engine.has_moe_layers:
        raise UnsupportedError(
            "mixture-of-experts layers with NVMe offload are not supported by DeepSpeed's saver"
        )
    if engine.mp_world_size > 1:
        raise UnsupportedError(
            "tensor parallel ranks are not supported yet", expected="1", found=engine.mp_world_size
        )
    if engine.checkpoint_engine.is_decoupled():
        raise UnsupportedError(
            "an asynchronous checkpoint engine publishes on its own, without our commit",
            found=type(engine.checkpoint_engine).__name__,
            hint='remove the "checkpoint_engine"/"nebula" section',
        )


def refuse_too_few_buffers(engine: Any) -> None:
    """ConfigError where the optimizer swapper would run out of buffers in the first step.

    Each sub-group in flight needs master + states + gradient; the pipelined swapper has the previous one
    (writing), the present one and the next one (reading) in flight at once
    (``pipelined_optimizer_swapper.py``).  Stock DeepSpeed asserts in the middle of the first step.
    """
    optimizer = engine.optimizer
    swapper = getattr(optimizer, "optimizer_swapper", None)
    if swapper is None:
        return
    swappable = sum(optimizer._swappable_optimizer_subgroup(i) for i in range(len(optimizer.fp16_groups)))
    if swappable == 0:
        return
    config = swapper.swap_config
    in_flight = min(swappable, 1 + int(config.pipeline_read) + int(config.pipeline_write))
    states = _STATES.get(type(optimizer.optimizer).__name__, 1)
    needed = in_flight * (states + 2)
    if config.buffer_count < needed:
        raise ConfigError(
            '"offload_optimizer.buffer_count" is too small: DeepSpeed would stop in the first step',
            expected=f">= {needed} ({in_flight} sub-groups in flight, {states + 2} buffers each)",
            found=config.buffer_count,
            hint=f'set "buffer_count": {needed}',
        )


_DIRECT_ALIGNMENT = 512  # bytes: what O_DIRECT asks of an address in memory


def misread_gradients(
    groups: list[plan.SubGroup], swapped: set[int], smallest: int, element: int
) -> list[str]:
    """Parameters whose gradients DeepSpeed reads wrongly from NVMe.

    A gradient partition of at least ``smallest`` bytes is swapped on its own and read back into its place in the
    sub-group (``optimizer_utils.py::get_swap_gradient_buffers``).  Where that place is not a multiple of 512 bytes the
    O_DIRECT read fails, the aio op reports success, and the step uses what the buffer held before (0.19.8).
    """
    return [
        p.name
        for group in groups
        if group.index in swapped
        for p in group.params
        if p.partition_numel * element >= smallest and p.offset * element % _DIRECT_ALIGNMENT
    ]


def warn_misread_gradients(engine: Any) -> None:
    """Say so where DeepSpeed itself trains on wrong gradients: no resume can be exact there."""
    optimizer = engine.optimizer
    swapper = getattr(optimizer, "optimizer_swapper", None)
    if swapper is None:
        return
    swapped = {i for i in range(len(optimizer.fp16_groups)) if optimizer._swappable_optimizer_subgroup(i)}
    names = misread_gradients(
        layout_of.sub_groups(engine), swapped, swapper.min_aio_bytes, swapper.swap_element_size
    )
    if names:
        logs.logger.warning(
            "DeepSpeed reads the gradients of %d parameters (first %s) from NVMe into places that are no multiple of "
            "512 bytes; such reads fail without a word and training uses stale values. Put parameters of odd sizes "
            "into another parameter group, or change sub_group_size or the number of ranks.",
            len(names),
            names[0],
        )
