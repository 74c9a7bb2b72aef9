"""What moves where: how the flat tensors of an engine are put together from those a checkpoint holds.

ZeRO-3 cuts every parameter into equal partitions, one for each rank, and lays the partitions of a sub-group
end to end in a flat tensor (DeepSpeed 0.19.8, ``stage3.py::_create_fp16_partitions_with_defragmentation``).
A parameter's element ``e`` thus lives on rank ``e // partition_numel`` at ``offset + e % partition_numel``.  With
the saved and the present layout both known by parameter NAME, any change of world size, ``sub_group_size`` or
grouping is a list of element ranges.  All numbers here are elements, never bytes.  Pure: no I/O, no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nvme_resume.errors import IncompatibleError
from nvme_resume.manifest import MASTER, Scalar, SubGroupRecord


@dataclass(frozen=True)
class Param:
    """One parameter of the present engine: global ``numel``, elements per rank, place in its sub-group."""

    name: str
    shape: tuple[int, ...]
    numel: int
    partition_numel: int
    offset: int


@dataclass(frozen=True)
class SubGroup:
    """One sub-group of the present engine."""

    index: int
    param_group: int
    numel: int
    params: tuple[Param, ...]


@dataclass(frozen=True)
class Segment:
    """Copy ``numel`` elements of ``(rank, sub_group)`` from ``src`` to ``dst`` of the target tensor."""

    rank: int
    sub_group: int
    src: int
    dst: int
    numel: int


@dataclass(frozen=True)
class Source:
    """Everything one target sub-group is restored from."""

    target: int
    whole: bool  # one saved sub-group of the same rank, bit for bit, padding included
    segments: tuple[Segment, ...]
    keys: tuple[str, ...]  # flat tensors, in the saved order
    scalars: Mapping[str, Scalar]
    template: SubGroupRecord  # the saved sub-group that dtypes and non-flat tensors come from


def partition_numel(numel: int, world_size: int) -> int:
    """Elements of a parameter that each rank holds, padding included (``partition_parameters.py``)."""
    return -(-numel // world_size)


def overlaps(numel: int, saved_world: int, world: int, rank: int) -> list[tuple[int, int, int, int]]:
    """Ranges of one parameter for ``rank`` of ``world``: (saved rank, its offset, target offset, elements)."""
    saved_part, part = partition_numel(numel, saved_world), partition_numel(numel, world)
    start, stop = rank * part, min((rank + 1) * part, numel)
    ranges = []
    position = start
    while position < stop:
        saved_rank = position // saved_part
        end = min((saved_rank + 1) * saved_part, stop)
        ranges.append((saved_rank, position - saved_rank * saved_part, position - start, end - position))
        position = end
    return ranges


def same_layout(saved: Sequence[SubGroupRecord], present: Sequence[SubGroup]) -> bool:
    """True when both cut the same parameters into the same sub-groups in the same order."""
    return len(saved) == len(present) and all(
        (s.numel, s.param_group) == (p.numel, p.param_group)
        and [(q.name, q.offset, q.partition_numel) for q in s.params]
        == [(q.name, q.offset, q.partition_numel) for q in p.params]
        for s, p in zip(saved, present, strict=True)
    )


def recut(
    saved: Sequence[SubGroupRecord],
    saved_world: int,
    present: Sequence[SubGroup],
    world: int,
    rank: int,
    *,
    weights_only: bool = False,
) -> list[Source]:
    """Sources for every present sub-group of ``rank``.

    ``saved`` is the layout of any one saved rank (only padding differs between ranks).  ``weights_only``
    leaves the optimizer's state out: master weights alone.  Raises
    IncompatibleError when parameters that now share a sub-group were saved with different state (another
    step count, or state for only some of them): a flat tensor has room for one answer.
    """
    if saved_world == world and same_layout(saved, present):
        return [
            Source(
                target=p.index,
                whole=True,
                segments=(Segment(rank, s.index, 0, 0, s.numel),),
                keys=_flat_keys(s, weights_only),
                scalars={} if weights_only else s.scalars,
                template=s,
            )
            for s, p in zip(saved, present, strict=True)
        ]
    home = {param.name: (group, param) for group in saved for param in group.params}
    sources = []
    for target in present:
        segments: list[Segment] = []
        template: SubGroupRecord | None = None
        for param in target.params:
            group, saved_param = home[param.name]
            if template is None:
                template = group
            if not weights_only:
                _check_same_state(target, template, group)
            for saved_rank, src, dst, numel in overlaps(param.numel, saved_world, world, rank):
                segments.append(
                    Segment(saved_rank, group.index, saved_param.offset + src, param.offset + dst, numel)
                )
        assert template is not None, "a sub-group has at least one parameter"
        sources.append(
            Source(
                target=target.index,
                whole=False,
                segments=tuple(_merge(segments)),
                keys=_flat_keys(template, weights_only),
                scalars={} if weights_only else template.scalars,
                template=template,
            )
        )
    return sources


def _flat_keys(group: SubGroupRecord, weights_only: bool = False) -> tuple[str, ...]:
    if weights_only:
        return (MASTER,)
    return tuple(t.key for t in group.tensors if t.flat)


def _check_same_state(target: SubGroup, first: SubGroupRecord, other: SubGroupRecord) -> None:
    if _flat_keys(first) != _flat_keys(other) or first.scalars != other.scalars:
        raise IncompatibleError(
            f"sub-group {target.index} now joins parameters whose optimizer state differs",
            expected=f"{_flat_keys(first)} {dict(first.scalars)}",
            found=f"{_flat_keys(other)} {dict(other.scalars)}",
            hint="resume with the sub_group_size of the saved run",
        )


def _merge(segments: list[Segment]) -> list[Segment]:
    """Join neighbours that continue each other on both sides."""
    merged: list[Segment] = []
    for segment in segments:
        last = merged[-1] if merged else None
        if (
            last is not None
            and (last.rank, last.sub_group) == (segment.rank, segment.sub_group)
            and last.src + last.numel == segment.src
            and last.dst + last.numel == segment.dst
        ):
            merged[-1] = Segment(last.rank, last.sub_group, last.src, last.dst, last.numel + segment.numel)
        else:
            merged.append(segment)
    return merged
