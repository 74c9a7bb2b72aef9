"""The re-cut plan against the definition: element e of a parameter must arrive where the new layout says."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvme_resume import plan
from nvme_resume.errors import IncompatibleError
from nvme_resume.manifest import MASTER, ParamRecord, SubGroupRecord, TensorRecord

Groups = list[list[int]]


def cut(sizes: list[int], groups: Groups, world: int) -> list[plan.SubGroup]:
    found = []
    for index, members in enumerate(groups):
        offset, params = 0, []
        for member in members:
            part = plan.partition_numel(sizes[member], world)
            params.append(plan.Param(f"p{member}", (sizes[member],), sizes[member], part, offset))
            offset += part
        found.append(plan.SubGroup(index, 0, offset, tuple(params)))
    return found


def as_saved(groups: list[plan.SubGroup], step: int = 1) -> list[SubGroupRecord]:
    return [
        SubGroupRecord(
            index=g.index,
            param_group=0,
            state_index=g.index,
            numel=g.numel,
            params=tuple(
                ParamRecord(
                    name=p.name,
                    shape=p.shape,
                    numel=p.numel,
                    partition_numel=p.partition_numel,
                    offset=p.offset,
                    padding=0,
                )
                for p in g.params
            ),
            tensors=(
                TensorRecord(
                    key=MASTER, dtype="float32", numel=g.numel, where="swap", file="f", nbytes=4 * g.numel
                ),
            ),
            scalars={"step": step},
        )
        for g in groups
    ]


def fill(sizes: list[int], groups: list[plan.SubGroup], world: int) -> list[list[np.ndarray]]:
    """Flat tensors of every rank holding ``1000 * parameter + element``; padding is -1."""
    ranks = []
    for rank in range(world):
        tensors = []
        for group in groups:
            flat = np.full(group.numel, -1, dtype=np.int64)
            for p in group.params:
                for position in range(p.partition_numel):
                    element = rank * p.partition_numel + position
                    if element < p.numel:
                        flat[p.offset + position] = 1000 * int(p.name[1:]) + element
            tensors.append(flat)
        ranks.append(tensors)
    return ranks


@st.composite
def splits(draw: st.DrawFn, count: int) -> Groups:
    order = draw(st.permutations(range(count)))
    marks = sorted(draw(st.sets(st.integers(1, max(1, count - 1)), max_size=count)))
    edges = [0, *[m for m in marks if m < count], count]
    return [list(order[a:b]) for a, b in itertools.pairwise(edges) if a < b]


@given(st.data(), st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 5), st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_every_element_arrives(data: st.DataObject, sizes: list[int], saved_world: int, world: int) -> None:
    old = cut(sizes, data.draw(splits(len(sizes))), saved_world)
    new = cut(sizes, data.draw(splits(len(sizes))), world)
    saved, expected = fill(sizes, old, saved_world), fill(sizes, new, world)
    for rank in range(world):
        for source in plan.recut(as_saved(old), saved_world, new, world, rank):
            target = np.full(new[source.target].numel, -1, dtype=np.int64)
            for s in source.segments:
                target[s.dst : s.dst + s.numel] = saved[s.rank][s.sub_group][s.src : s.src + s.numel]
            assert (target == expected[rank][source.target]).all()


def test_the_same_layout_is_copied_whole_padding_included() -> None:
    groups = cut([5, 7], [[0], [1]], 2)
    for source in plan.recut(as_saved(groups), 2, groups, 2, 1):
        assert source.whole
        assert [(s.rank, s.src, s.numel) for s in source.segments] == [(1, 0, groups[source.target].numel)]


def test_joining_sub_groups_with_different_steps_is_refused() -> None:
    old = as_saved(cut([4, 4], [[0], [1]], 1))
    old[1] = old[1].model_copy(update={"scalars": {"step": 9}})
    new = cut([4, 4], [[0, 1]], 1)
    with pytest.raises(IncompatibleError, match="state differs"):
        plan.recut(old, 1, new, 1, 0)
    assert plan.recut(old, 1, new, 1, 0, weights_only=True)[0].keys == (MASTER,)
