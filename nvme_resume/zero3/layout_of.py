"""Read the layout of a live ZeRO-3 engine: sub-groups by parameter name, frozen parameters, dtypes."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.utils import is_optimized_parameter

from nvme_resume import compat, plan
from nvme_resume.manifest import TensorRecord


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a record's name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"not a dtype: {name!r}")
    return dtype


def sub_groups(engine: Any) -> list[plan.SubGroup]:
    """The sub-groups of the engine's optimizer, parameters by name, sizes in elements."""
    optimizer = engine.optimizer
    found = []
    for index, group in enumerate(optimizer.fp16_groups):
        offset = 0
        params = []
        for param in group:
            size = int(param.partition_numel())
            params.append(
                plan.Param(
                    name=engine.param_names[param],
                    shape=tuple(param.ds_shape),
                    numel=int(param.ds_numel),
                    partition_numel=size,
                    offset=offset,
                )
            )
            offset += size
        found.append(
            plan.SubGroup(
                index=index,
                param_group=int(optimizer.sub_group_to_group_id[index]),
                numel=offset,
                params=tuple(params),
            )
        )
    return found


def frozen_params(engine: Any) -> list[tuple[str, Any]]:
    """(name, parameter) of all partitioned parameters that the optimizer does not own, in module order."""
    return [
        (engine.param_names[param], param)
        for param in engine.module.parameters()
        if hasattr(param, "ds_id") and not is_optimized_parameter(param)
    ]


def describe(engine: Any, rank: int, world_size: int) -> compat.Engine:
    """The facts of this engine that a checkpoint must fit."""
    optimizer = engine.optimizer
    return compat.Engine(
        rank=rank,
        world_size=world_size,
        optimizer=type(optimizer.optimizer).__name__,
        master_dtype=dtype_name(optimizer.master_weights_and_grads_dtype),
        sub_groups=sub_groups(engine),
        frozen={name: tuple(param.ds_shape) for name, param in frozen_params(engine)},
    )


def state_indices(engine: Any) -> list[int]:
    """Index of each sub-group in the packed optimizer state dict.

    torch numbers parameters group by group; DeepSpeed appends each sub-group to its group in sub-group order
    (``stage3.py::_set_fp32_optimizer_param_groups``).
    """
    owners = [
        int(engine.optimizer.sub_group_to_group_id[i]) for i in range(len(engine.optimizer.fp16_groups))
    ]
    return packed_indices(owners)


def packed_indices(owners: list[int]) -> list[int]:
    """Packed index of each sub-group, given the param group each belongs to."""
    order = sorted(range(len(owners)), key=lambda i: (owners[i], i))
    indices = [0] * len(owners)
    for packed, sub_group in enumerate(order):
        indices[sub_group] = packed
    return indices


def swapped_tensor(key: str, dtype: str, numel: int, element: int, file: str) -> TensorRecord:
    """Record of a flat tensor of ``numel`` elements of ``element`` bytes that lies in a swap file."""
    return TensorRecord(key=key, dtype=dtype, numel=numel, where="swap", file=file, nbytes=numel * element)


def tensor_in_pt(key: str, value: torch.Tensor, numel: int, file: str) -> TensorRecord:
    """Record of a tensor that DeepSpeed's optimizer file holds; ``numel`` is that of the sub-group."""
    return TensorRecord(
        key=key,
        dtype=dtype_name(value.dtype),
        numel=value.numel(),
        where="pt",
        file=file,
        nbytes=value.numel() * value.element_size(),
        flat=value.numel() == numel,
    )
