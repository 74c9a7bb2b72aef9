"""Does this checkpoint fit this engine?  Pure comparison; the answer is silence or one IncompatibleError.

What may change freely between save and resume, because ``plan`` re-cuts it exactly: world size,
``sub_group_size``, aio ``block_size`` and ``intra_op_parallelism``, ``buffer_count``, ``nvme_path``, offload
devices, the 16-bit dtype (masters are saved, 16-bit weights follow from them).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nvme_resume.errors import IncompatibleError
from nvme_resume.manifest import RankRecord
from nvme_resume.plan import SubGroup


@dataclass(frozen=True)
class Engine:
    """What must be known of the present engine to answer."""

    rank: int
    world_size: int
    optimizer: str
    master_dtype: str
    sub_groups: Sequence[SubGroup]
    frozen: Mapping[str, tuple[int, ...]]  # name -> shape


def check(saved: RankRecord, engine: Engine, *, weights_only: bool, partial_frozen: bool) -> None:
    """Compare names, shapes, optimizer and dtypes.

    ``weights_only``: the optimizer's state is not wanted, so its type and groups do not matter.
    ``partial_frozen``: the checkpoint was saved without (some) frozen parameters.
    """
    where = {"rank": engine.rank, "tag": saved.tag}
    saved_params = {p.name: p.shape for g in saved.sub_groups for p in g.params}
    present = {p.name: p.shape for g in engine.sub_groups for p in g.params}
    _compare("trainable parameter", saved_params, present, where)
    saved_frozen = {f.name: f.shape for f in saved.frozen}
    if partial_frozen:
        engine_frozen = {name: shape for name, shape in engine.frozen.items() if name in saved_frozen}
    else:
        engine_frozen = dict(engine.frozen)
    _compare("frozen parameter", saved_frozen, engine_frozen, where)
    if saved.master_dtype != engine.master_dtype:
        raise IncompatibleError(
            "the dtype of master weights changed",
            expected=saved.master_dtype,
            found=engine.master_dtype,
            hint="use the bf16/fp16 master-weight settings of the saved run",
            **where,  # type: ignore[arg-type]
        )
    if weights_only:
        return
    if saved.optimizer != engine.optimizer:
        raise IncompatibleError(
            "the optimizer changed, its state cannot be carried over",
            expected=saved.optimizer,
            found=engine.optimizer,
            hint="use the saved optimizer, or load_optimizer_states=False for the weights alone",
            **where,  # type: ignore[arg-type]
        )
    saved_groups = {p.name: g.param_group for g in saved.sub_groups for p in g.params}
    groups = {p.name: g.param_group for g in engine.sub_groups for p in g.params}
    moved = sorted(name for name, group in saved_groups.items() if groups[name] != group)
    if moved:
        raise IncompatibleError(
            f"parameter {moved[0]!r} (and {len(moved) - 1} more) moved to another parameter group",
            expected=f"group {saved_groups[moved[0]]}",
            found=f"group {groups[moved[0]]}",
            hint="build the optimizer's parameter groups as in the saved run",
            **where,  # type: ignore[arg-type]
        )


def _compare(
    what: str,
    saved: Mapping[str, tuple[int, ...]],
    present: Mapping[str, tuple[int, ...]],
    where: Mapping[str, object],
) -> None:
    for name in sorted(saved.keys() | present.keys()):
        if name not in present:
            found: object = "absent in this model"
        elif name not in saved:
            found = f"{tuple(present[name])}, absent in the checkpoint"
        elif tuple(saved[name]) != tuple(present[name]):
            found = tuple(present[name])
        else:
            continue
        raise IncompatibleError(
            f"{what} {name!r} does not match the checkpoint",
            expected=tuple(saved[name]) if name in saved else "absent",
            found=found,
            hint="resume with the model that was saved (same names and shapes, same parameters frozen)",
            **where,  # type: ignore[arg-type]
        )
