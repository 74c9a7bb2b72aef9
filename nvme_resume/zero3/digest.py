"""Fingerprints of one rank's training state, to tell two runs apart by kind and by place.

Read only: swapped tensors come in through the optimizer's own swapper and its buffers are given back without
a write, so training goes on as if nobody had looked.  No collectives here: each rank speaks for its own
partition.

A value is the XXH3-128 (hex) of the exact bytes, or the plain text of a small value (a step count, a learning
rate), which says more when it differs.  Padding is left out: DeepSpeed pads the last rank's partitions with
memory it never sets (0.19.8, ``partition_parameters.py::_partition_param``), different in every process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
import xxhash
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from nvme_resume.zero3 import layout_of, quiesce, rng

ABSENT = "absent"
MASTER, PARAM16, BUFFER = "master", "param16", "buffer"
STEP, LR, HYPER, SCALER, RNG = "step", "lr", "hyper", "loss_scaler", "rng"

Digests = dict[str, dict[str, str]]


def state_digests(engine: Any) -> Digests:
    """Digests by kind, then by place: ``{"master": {"sub-group 0": ...}, "exp_avg": {...}, ...}``.

    The optimizer's own tensors appear under the names the optimizer gives them.  A sub-group that lacks one
    which another sub-group has is reported as ``"absent"``.
    """
    quiesce.quiesce(engine)
    found = _sub_groups(engine)
    found[PARAM16] = {name: _weight(engine, param) for name, param in _partitioned(engine)}
    found[BUFFER] = dict(_buffers(engine.module))
    found.setdefault(STEP, {}).update(_counters(engine))
    found[LR] = _learning_rates(engine)
    found[HYPER] = _hyper(engine)
    found[SCALER] = _loss_scaler(engine)
    found[RNG] = _rng()
    return found


def of_tensor(*pieces: torch.Tensor) -> str:
    """XXH3-128 of the bytes of a tensor, or of several end to end."""
    hasher = xxhash.xxh3_128()
    for piece in pieces:
        hasher.update(_bytes(piece).cpu().numpy().data)
    return hasher.hexdigest()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def of_value(value: Any) -> str:
    """The text of a plain value; a digest where that text would be long."""
    if torch.is_tensor(value):
        return str(value.item()) if value.numel() == 1 else of_tensor(value)
    text = repr(value) if isinstance(value, float) else json.dumps(value, sort_keys=True, default=str)
    return text if len(text) <= 60 else xxhash.xxh3_128_hexdigest(text.encode())


def _sub_groups(engine: Any) -> Digests:
    """Master weights and optimizer state, one sub-group in memory at a time."""
    optimizer = engine.optimizer
    found: Digests = {MASTER: {}}
    for group in layout_of.sub_groups(engine):
        index = group.index
        real = [_real_numel(optimizer, param) for param in optimizer.fp16_groups[index]]
        swapped = optimizer._swappable_optimizer_subgroup(index)
        if swapped:
            # No timer names: the pipelined swapper then does not start to read the next sub-group ahead.
            optimizer._optimizer_states_and_gradient_swap_in(index)
        try:
            for key, value in _tensors(optimizer, index):
                if torch.is_tensor(value) and value.numel() == group.numel:
                    pieces = [value.narrow(0, p.offset, n) for p, n in zip(group.params, real, strict=True)]
                    digest = of_tensor(*pieces)
                else:
                    digest = of_value(value)
                found.setdefault(key, {})[f"sub-group {index}"] = digest
        finally:
            if swapped:
                optimizer._release_swap_buffers(index)
    for places in found.values():
        for index in range(len(optimizer.fp16_groups)):
            places.setdefault(f"sub-group {index}", ABSENT)
    return found


def _real_numel(optimizer: Any, param: Any) -> int:
    """Elements of this rank's partition that belong to the parameter; the rest is padding."""
    held = int(param.ds_tensor.ds_numel)
    start = int(optimizer._get_param_partition_rank(param)) * held
    return max(0, min(held, int(param.ds_numel) - start))


def _tensors(optimizer: Any, index: int) -> Iterator[tuple[str, Any]]:
    """(key, value) of everything the optimizer keeps for one sub-group; it must be in memory."""
    master = optimizer.fp32_partitioned_groups_flat[index]
    yield MASTER, master
    state = optimizer.optimizer.state.get(master, {})
    yield from state.items()
    # Muon's momentum kept in memory is outside the optimizer's state (stage3.py::_create_momentum_buffer).
    momentum = getattr(optimizer, "muon_momentum_buffer_partitioned_groups_flat", {}).get(index)
    if momentum is not None and "momentum_buffer" not in state:
        yield "momentum_buffer", momentum


def _partitioned(engine: Any) -> Iterator[tuple[str, Any]]:
    """(name, parameter) of all parameters, frozen ones included."""
    for param in engine.module.parameters():
        if hasattr(param, "ds_tensor"):
            yield engine.param_names[param], param


def _weight(engine: Any, param: Any) -> str:
    """Digest of this rank's partition of a parameter as the model sees it."""
    optimizer = engine.optimizer
    numel = _real_numel(optimizer, param)
    swapped = param.ds_tensor.status is PartitionedParamStatus.NOT_AVAILABLE and param.ds_tensor.ds_numel
    if swapped:
        param.nvme_swapper.swap_in([param], async_op=False)
    try:
        mine = param.ds_tensor.detach().reshape(-1)[:numel]
        digest = of_tensor(mine)
        # Small parameters stay gathered between steps: the next forward pass uses that copy.
        if param.ds_status is ZeroParamStatus.AVAILABLE:
            start = optimizer._get_param_partition_rank(param) * param.ds_tensor.ds_numel
            gathered = param.detach().reshape(-1)[start : start + numel]
            if not torch.equal(_bytes(gathered), _bytes(mine).to(gathered.device)):
                return f"{digest}, but its gathered copy differs"
        return digest
    finally:
        if swapped:
            param.nvme_swapper.remove_partition_and_release_buffers([param])


def _buffers(module: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Buffers that belong to the model's state (batch norm statistics and the like)."""
    for prefix, child in module.named_modules():
        for name, value in child.named_buffers(prefix=prefix, recurse=False):
            if name.rpartition(".")[2] not in child._non_persistent_buffers_set:
                yield name, of_tensor(value)


def _counters(engine: Any) -> dict[str, str]:
    names = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
    return {f"engine.{name}": str(getattr(engine, name)) for name in names}


def _learning_rates(engine: Any) -> dict[str, str]:
    groups = engine.optimizer.optimizer.param_groups
    found = {f"group {i}": of_value(group.get("lr")) for i, group in enumerate(groups)}
    if engine.lr_scheduler is not None:
        found["scheduler"] = of_value(engine.lr_scheduler.state_dict())
    return found


def _hyper(engine: Any) -> dict[str, str]:
    """Betas, weight decay and all else in the parameter groups, learning rates left out."""
    return {
        f"group {i}.{key}": of_value(value)
        for i, group in enumerate(engine.optimizer.optimizer.param_groups)
        for key, value in group.items()
        if key not in ("params", "lr")
    }


def _loss_scaler(engine: Any) -> dict[str, str]:
    optimizer = engine.optimizer
    found = {key: of_value(value) for key, value in vars(optimizer.loss_scaler).items()}
    found["overflow"] = str(bool(optimizer.overflow))
    scaler = getattr(optimizer, "torch_autocast_gradscaler", None)
    if scaler is not None:
        found["grad scaler"] = of_value(scaler.state_dict())
    return found


def _rng() -> dict[str, str]:
    python, numpy_state, tensors = rng.capture()
    found = {"python": of_value(python), "numpy": of_value(numpy_state)}
    found.update({name.removeprefix("rng."): of_tensor(state) for name, state in tensors.items()})
    return found
