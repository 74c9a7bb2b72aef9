"""What a save must take from a live ZeRO-3 engine: live swap files, records, the small state nobody else keeps."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from safetensors import SafetensorError
from safetensors.torch import save_file

from nvme_resume import layout, plan
from nvme_resume.manifest import (
    MASTER,
    Extras,
    FrozenRecord,
    ParamRecord,
    RankRecord,
    Scalar,
    SubGroupRecord,
    TensorRecord,
)
from nvme_resume.storage import room
from nvme_resume.zero3 import adam, layout_of, quiesce, rng, supported

_CANNOT_WRITE = re.compile(r"inline_container|iostream|PytorchStreamWriter|os error \d+")
GRADIENTS = "accumulation.gradients"


@dataclass(frozen=True)
class SwapCopy:
    """One live swap file and its place in the checkpoint.

    ``public`` is the name DeepSpeed knows it by, ``nbytes`` what the swapper wrote; ``rewritten``: every step writes it
    anew (the optimizer's tensors), or none does (frozen parameters).
    """

    public: Path
    relative: str
    nbytes: int
    rewritten: bool


@dataclass(frozen=True)
class Captured:
    """Everything of one rank that is not in DeepSpeed's own ``.pt`` files."""

    record: RankRecord
    copies: tuple[SwapCopy, ...]


def capture(
    engine: Any, *, checkpoint_id: str, tag: str, rank: int, world_size: int, frozen: bool
) -> Captured:
    """Describe this rank's state; reads no bulk data.  ``frozen``: include frozen parameters."""
    optimizer = engine.optimizer
    copies: list[SwapCopy] = []
    optim_file = Path(engine._get_zero_ckpt_name("", tag)).name
    indices = layout_of.state_indices(engine)
    groups = []
    for group in layout_of.sub_groups(engine):
        paddings = tuple(int(p) for p in optimizer.groups_padding[group.index])
        tensors, scalars = _tensors(engine, group.index, group.numel, rank, optim_file, copies)
        groups.append(
            SubGroupRecord(
                index=group.index,
                param_group=group.param_group,
                state_index=indices[group.index],
                numel=group.numel,
                params=_param_records(group.params, paddings),
                tensors=tuple(tensors),
                scalars=scalars,
            )
        )
    record = RankRecord(
        checkpoint_id=checkpoint_id,
        tag=tag,
        rank=rank,
        world_size=world_size,
        optimizer=type(optimizer.optimizer).__name__,
        master_dtype=layout_of.dtype_name(optimizer.master_weights_and_grads_dtype),
        optim_file=optim_file,
        model_file=Path(engine._get_ckpt_name("", tag)).name,
        sub_groups=tuple(groups),
        frozen=tuple(_frozen(engine, rank, copies)) if frozen else (),
    )
    return Captured(record=record, copies=tuple(copies))


@lru_cache(maxsize=4096)
def _param_records(params: tuple[plan.Param, ...], paddings: tuple[int, ...]) -> tuple[ParamRecord, ...]:
    """Records of a sub-group's parameters.  Kept: they are the same at every save, and training waits for them."""
    return tuple(
        ParamRecord(
            name=p.name,
            shape=p.shape,
            numel=p.numel,
            partition_numel=p.partition_numel,
            offset=p.offset,
            padding=padding,
        )
        for p, padding in zip(params, paddings, strict=True)
    )


def _tensors(
    engine: Any, index: int, numel: int, rank: int, optim_file: str, copies: list[SwapCopy]
) -> tuple[list[TensorRecord], dict[str, Scalar]]:
    """Flat tensors and plain values of one sub-group; live swap files are appended to ``copies``."""
    optimizer = engine.optimizer
    master = optimizer.fp32_partitioned_groups_flat[index]
    swapped: dict[int, str] = {}  # id of the tensor object -> swap file
    if optimizer._swappable_optimizer_subgroup(index):
        info = optimizer.optimizer_swapper.swap_params_info[master.ds_id]
        swapped = {id(context.compute_tensor): context.swap_path for context in info.tensors}
    tensors = []
    scalars: dict[str, Scalar] = {}
    for key, value in [(MASTER, master), *optimizer.optimizer.state.get(master, {}).items()]:
        if not torch.is_tensor(value):
            scalars[key] = value
        elif id(value) in swapped:
            swapper = optimizer.optimizer_swapper
            source = Path(swapped[id(value)])
            relative = layout.swap_path(rank, source.name)
            copies.append(
                SwapCopy(
                    source,
                    relative,
                    swapper._io_aligned_numel(numel) * swapper.swap_element_size,
                    rewritten=True,
                )
            )
            dtype = layout_of.dtype_name(swapper.dtype)
            tensors.append(layout_of.swapped_tensor(key, dtype, numel, swapper.swap_element_size, relative))
        else:
            tensors.append(layout_of.tensor_in_pt(key, value, numel, optim_file))
    return tensors, scalars


def _frozen(engine: Any, rank: int, copies: list[SwapCopy]) -> list[FrozenRecord]:
    """Frozen parameters.  Those on NVMe are copied from their swap files: DeepSpeed 0.19.8 saves a
    one-element placeholder for them (``engine.py::_get_param_fragment_func``)."""
    found = []
    for index, (name, param) in enumerate(layout_of.frozen_params(engine)):
        fragment = param.ds_tensor
        numel = int(fragment.ds_numel)
        relative = None
        if numel and fragment.status is PartitionedParamStatus.NOT_AVAILABLE:
            swapper = param.nvme_swapper
            relative = layout.frozen_path(rank, index)
            nbytes = swapper._io_aligned_numel(numel) * swapper.swap_element_size
            public = Path(swapper.get_path(param, must_exist=True))
            copies.append(SwapCopy(public, relative, nbytes, rewritten=False))
            dtype = swapper.dtype
        else:
            dtype = fragment.dtype
        found.append(
            FrozenRecord(
                name=name,
                shape=tuple(param.ds_shape),
                numel=int(param.ds_numel),
                partition_numel=numel,
                dtype=layout_of.dtype_name(dtype),
                file=relative,
            )
        )
    return found


def write_extras(engine: Any, folder: Path, *, checkpoint_id: str, rank: int, with_rng: bool) -> Extras:
    """Write the extras tensors (if any) into ``folder`` and return the record that goes with them."""
    tensors: dict[str, torch.Tensor] = {}
    python_rng = numpy_rng = None
    if with_rng:
        python_rng, numpy_rng, tensors = rng.capture()
    zero3 = supported.is_zero3(engine)
    window = quiesce.accumulation(engine) if zero3 else None
    if window is not None:
        tensors[GRADIENTS] = engine.optimizer.grad_partitions_flat_buffer.detach().cpu()
    scaler = getattr(engine.optimizer, "torch_autocast_gradscaler", None)
    relative = None
    if tensors:
        relative = layout.extras_tensors(rank)
        path = folder / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        with _disk_errors(folder):
            save_file(tensors, path)
        # safetensors may leave it to the owner alone, whatever the umask.
        path.chmod(path.parent.stat().st_mode & 0o666)
    return Extras(
        checkpoint_id=checkpoint_id,
        rank=rank,
        micro_steps=engine.micro_steps,
        adam=adam.capture(engine),
        accumulation=window,
        grad_scaler=None if scaler is None else scaler.state_dict(),
        python_rng=python_rng,
        numpy_rng=numpy_rng,
        tensors_file=relative,
    )


def write_stock_files(
    engine: Any, save_dir: Path, folder: str, client_state: dict[str, Any], exclude_frozen_parameters: bool
) -> None:
    """DeepSpeed's own ``.pt`` files of this rank into ``save_dir/folder``.

    The pieces of ``engine.py::save_checkpoint`` without its barriers (an error here must reach the other
    ranks) and without its copy of the swap folder.
    """
    with _disk_errors(save_dir / folder):
        engine._create_checkpoint_file(str(save_dir), folder, False)
        engine._save_checkpoint(
            str(save_dir),
            folder,
            client_state=client_state,
            exclude_frozen_parameters=exclude_frozen_parameters,
        )
        if engine.save_zero_checkpoint:
            engine._save_zero_checkpoint(str(save_dir), folder)


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """What torch and safetensors raise when a file cannot be written names no errno: "unexpected pos 128 vs 0"."""
    try:
        yield
    except (RuntimeError, SafetensorError) as error:
        if _CANNOT_WRITE.search(str(error)) is None:
            raise
        raise room.why_not(folder, f"a file could not be written ({str(error).splitlines()[0]})") from error


def settings(engine: Any) -> dict[str, Scalar]:
    """Facts of the configuration that help a human who looks at a checkpoint later."""
    optimizer = engine.optimizer
    zero = engine._config.zero_config
    return {
        "zero_stage": int(engine.zero_optimization_stage()),
        "optimizer": type(optimizer.optimizer).__name__,
        "dtype": layout_of.dtype_name(optimizer.dtype),
        "sub_group_size": int(zero.sub_group_size),
        "offload_optimizer": _device(zero.offload_optimizer),
        "offload_param": _device(zero.offload_param),
        "aio_block_size": int(engine._config.aio_config["block_size"]),
        "aio_intra_op_parallelism": int(engine._config.aio_config["intra_op_parallelism"]),
    }


def _device(offload: Any) -> str:
    """``nvme`` for an offload section of DeepSpeed's configuration."""
    return "none" if offload is None else str(getattr(offload.device, "value", offload.device))
