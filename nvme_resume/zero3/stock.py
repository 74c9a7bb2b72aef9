"""Checkpoints written by plain DeepSpeed: they hold all that its own loader skips.

From its ``.pt`` files we make the same rank record that we would have written.  What cannot be known: random
states, an open accumulation window, and hashes (plain DeepSpeed writes none, so only sizes are checked).
Layouts: ``offloaded_tensors/rankNN/`` (0.18 and later) and the flat ``offloaded_tensors/`` (0.13 to 0.17), where
several ranks overwrote each other's files: that one is accepted from a single rank only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS, FROZEN_PARAM_SHAPES, PARAM_SHAPES

from nvme_resume import layout, logs, plan
from nvme_resume.errors import CorruptError, IncompatibleError, NoCheckpointError
from nvme_resume.manifest import (
    MASTER,
    FrozenRecord,
    ParamRecord,
    RankRecord,
    Scalar,
    SubGroupRecord,
)
from nvme_resume.zero3 import layout_of, pt_files

_MOST_PADDING = 1 << 20  # bytes a swap file may exceed its tensor by (alignment for up to 1024 threads)


def as_deepspeed_does() -> None:
    """Trust for files without a hash: plain DeepSpeed unpickles its model file in any case."""
    logs.logger.warning(
        "this checkpoint of plain DeepSpeed holds objects beyond plain values and tensors; reading it runs code from it"
    )


def world_size(folder: Path) -> int:
    """World size of a plain DeepSpeed ZeRO-3 checkpoint; NoCheckpointError when the folder is none."""
    path = folder / layout.model_states(0)
    if not path.is_file():
        raise NoCheckpointError(
            "not a ZeRO-3 checkpoint",
            path=str(folder),
            expected=path.name,
            found="no such file",
            hint="give the folder that holds the tags, and a tag in it",
        )
    return _world_size_in(path)


def world_size_of(folders: Sequence[Path]) -> int:
    """The same from the parts that several nodes hold.  NoCheckpointError, CorruptError."""
    for folder in folders:
        for path in sorted(folder.glob("zero_pp_rank_*_mp_rank_00_model_states.pt")):
            return _world_size_in(path)
    raise NoCheckpointError(
        "no model file of ZeRO-3 in any of the folders", path=", ".join(map(str, folders))
    )


def _world_size_in(path: Path) -> int:
    saved = pt_files.load(path, as_deepspeed_does).get("dp_world_size")
    if not isinstance(saved, int) or saved < 1:
        raise CorruptError("no world size in the model file", path=str(path))
    return saved


def synthesize(folder: Path, rank: int, engine: Any) -> RankRecord:
    """The rank record that this rank's files amount to.  ``engine`` gives the order of parameter ids."""
    model_path = folder / layout.model_states(rank)
    model = pt_files.load(model_path, as_deepspeed_does)
    optim_name = next(
        (
            n
            for n in (layout.optim_states(rank, True), layout.optim_states(rank, False))
            if (folder / n).is_file()
        ),
        None,
    )
    if optim_name is None:
        raise CorruptError(
            "optimizer file is missing",
            rank=rank,
            tag=folder.name,
            path=str(folder / layout.optim_states(rank, False)),
        )
    optim = pt_files.OptimFile(folder / optim_name, as_deepspeed_does)
    shapes = model.get(PARAM_SHAPES)
    if not isinstance(shapes, list) or len(shapes) != len(optim.masters):
        raise CorruptError(
            "model and optimizer file disagree on the sub-groups", rank=rank, path=str(model_path)
        )
    world = int(model["dp_world_size"])
    owner = {i: g for g, group in enumerate(optim.param_groups) for i in group["params"]}
    numels = [sum(plan.partition_numel(s.numel(), world) for s in group.values()) for group in shapes]
    swapped = [i for i, master in enumerate(optim.masters) if master.numel() == 0]
    element = optim.masters[0].element_size()
    dtype = layout_of.dtype_name(optim.masters[0].dtype)
    files = (
        _match_files(
            folder, rank, world, optim, {i: list(shapes[i]) for i in swapped}, numels, element, engine
        )
        if swapped
        else {}
    )
    groups = []
    for index, group in enumerate(shapes):
        # Without mixture-of-experts, sub-groups are made group by group: packed index = sub-group index.
        state = optim.states.get(index, {})
        tensors, scalars = [], {}
        for key, value in [(MASTER, optim.masters[index]), *state.items()]:
            if not hasattr(value, "numel"):
                scalars[key] = _scalar(value)
            elif value.numel() == 0 and index in files:
                relative = files[index].format(key="" if key == MASTER else f"{key}-")
                tensors.append(layout_of.swapped_tensor(key, dtype, numels[index], element, relative))
            else:
                tensors.append(layout_of.tensor_in_pt(key, value, numels[index], optim_name))
        offset = 0
        params = []
        for name, shape in group.items():
            size = plan.partition_numel(shape.numel(), world)
            params.append(
                ParamRecord(
                    name=name,
                    shape=tuple(shape),
                    numel=shape.numel(),
                    partition_numel=size,
                    offset=offset,
                    padding=max(0, (rank + 1) * size - shape.numel()) if rank == world - 1 else 0,
                )
            )
            offset += size
        groups.append(
            SubGroupRecord(
                index=index,
                param_group=owner.get(index, 0),
                state_index=index,
                numel=numels[index],
                params=tuple(params),
                tensors=tuple(tensors),
                scalars=scalars,
            )
        )
    fragments = model.get(FROZEN_PARAM_FRAGMENTS) or {}
    frozen = []
    for name, shape in (model.get(FROZEN_PARAM_SHAPES) or {}).items():
        size = plan.partition_numel(shape.numel(), world)
        if size and fragments[name].numel() != size:
            raise IncompatibleError(
                f"plain DeepSpeed did not save frozen parameter {name!r} (it was on NVMe)",
                rank=rank,
                tag=folder.name,
                expected=f"{size} elements",
                found=fragments[name].numel(),
                hint="load the base model's weights first, then its trained parameters by another way",
            )
        frozen.append(
            FrozenRecord(
                name=name,
                shape=tuple(shape),
                numel=shape.numel(),
                partition_numel=size,
                dtype=layout_of.dtype_name(fragments[name].dtype),
            )
        )
    return RankRecord(
        checkpoint_id="deepspeed",
        tag=folder.name,
        rank=rank,
        world_size=world,
        optimizer=type(
            engine.optimizer.optimizer
        ).__name__,  # not recorded by DeepSpeed; state keys are checked
        master_dtype=dtype,
        optim_file=optim_name,
        model_file=model_path.name,
        sub_groups=tuple(groups),
        frozen=tuple(frozen),
    )


def _scalar(value: Any) -> Scalar:
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    raise CorruptError(f"optimizer state of an unknown type {type(value).__name__}")


def _match_files(
    folder: Path,
    rank: int,
    world: int,
    optim: pt_files.OptimFile,
    params: dict[int, list[str]],
    numels: list[int],
    element: int,
    engine: Any,
) -> dict[int, str]:
    """Which swap files belong to which swapped sub-group: index -> relative name with a ``{key}`` field.

    Names carry the ``ds_id`` of the first and last parameter in the process that wrote them.  Ids of another
    process differ by a constant (what else it had built before), so the present engine's ids, shifted, must
    hit a file of the right size for every sub-group.  Left-overs of earlier runs may fit by accident; then
    the newest complete set is the live one.
    """
    where = _swap_folder(folder, rank, world, optim)
    relative = where.relative_to(folder).as_posix()
    ids = {name: p.ds_id for p, name in engine.param_names.items()}
    sizes: dict[tuple[int, int], tuple[int, float]] = {}
    for path in where.iterdir():
        parsed = layout.parse_swap_file(path.name)
        if parsed is not None and parsed[0] is None:
            info = path.stat()
            sizes[parsed[1], parsed[2]] = (info.st_size, info.st_mtime)

    def fits(index: int, pair: tuple[int, int]) -> bool:
        extra = sizes[pair][0] - numels[index] * element if pair in sizes else -1
        return 0 <= extra < _MOST_PADDING

    missing = [name for names in params.values() for name in names if name not in ids]
    if missing:
        raise IncompatibleError(
            f"parameter {missing[0]!r} of the checkpoint is not in this model", rank=rank, tag=folder.name
        )
    wanted = {i: (ids[names[0]], ids[names[-1]]) for i, names in params.items()}
    anchor = next(iter(wanted))
    shifts = [
        first - wanted[anchor][0]
        for first, last in sizes
        if fits(anchor, (first, last)) and last - wanted[anchor][1] == first - wanted[anchor][0]
    ]
    sets = [s for s in shifts if all(fits(i, (a + s, b + s)) for i, (a, b) in wanted.items())]
    if len(sets) > 1:
        oldest = {s: min(sizes[a + s, b + s][1] for a, b in wanted.values()) for s in sets}
        newest = {s: max(sizes[a + s, b + s][1] for a, b in wanted.values()) for s in sets}
        sets = [s for s in sets if all(oldest[s] > newest[o] for o in sets if o != s)]
    if len(sets) != 1:
        raise CorruptError(
            "cannot tell which swap files belong to which sub-group",
            rank=rank,
            tag=folder.name,
            path=str(where),
            expected=f"one set of {len(wanted)} files of the right sizes",
            found=f"{len(sets)} sets among {len(sizes)} files",
            hint="build the model as in the run that saved (zero.Init or not, same parameter order)",
        )
    shift = sets[0]
    return {
        i: f"{relative}/{{key}}{first + shift}_{last + shift}.tensor.swp"
        for i, (first, last) in wanted.items()
    }


def _swap_folder(folder: Path, rank: int, world: int, optim: pt_files.OptimFile) -> Path:
    """The folder with one rank's swap files."""
    base = folder / layout.SWAP
    named = base / layout.rank_folder(rank)
    if named.is_dir():
        return named
    local = base / layout.rank_folder(int(os.environ.get("LOCAL_RANK", "0")))
    node_local = (optim.ds_config.get("checkpoint") or {}).get("use_node_local_storage", False)
    if node_local and local.is_dir():
        return local  # DeepSpeed names the folder by LOCAL rank there (0.19.8, engine.py::save_checkpoint)
    if base.is_dir() and any(base.glob("*.tensor.swp")):
        if world == 1:
            return base
        raise IncompatibleError(
            "DeepSpeed before 0.18 let all ranks write into one folder; they overwrote each other's files",
            rank=rank,
            tag=folder.name,
            path=str(base),
            expected=f"one folder for each of {world} ranks",
            found="one flat folder",
            hint="this checkpoint is lost; its 16-bit weights may still be in a consolidated file",
        )
    raise CorruptError("swap files are missing", rank=rank, tag=folder.name, path=str(named))
