"""Records whose digests are right but which cannot mean anything are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nvme_resume import integrity
from nvme_resume.errors import CorruptError
from nvme_resume.manifest import (
    MASTER,
    AdamCounter,
    Extras,
    FileRecord,
    FileSeal,
    ParamRecord,
    RankRecord,
    Seal,
    SubGroupRecord,
    TensorRecord,
)

Trio = tuple[RankRecord, Seal, Extras]


def tensor(key: str, file: str, where: Any = "swap", numel: int = 8) -> TensorRecord:
    return TensorRecord(key=key, dtype="float32", numel=numel, where=where, file=file, nbytes=4 * numel)


def sound() -> Trio:
    params = tuple(
        ParamRecord(name=n, shape=(4,), numel=4, partition_numel=4, offset=o, padding=0)
        for n, o in (("a", 0), ("b", 4))
    )
    group = SubGroupRecord(
        index=0,
        param_group=0,
        state_index=0,
        numel=8,
        params=params,
        tensors=(
            tensor(MASTER, "offloaded_tensors/rank00/m.swp"),
            tensor("exp_avg", "offloaded_tensors/rank00/e.swp"),
            tensor("exp_avg_sq", "o.pt", "pt"),
        ),
        scalars={"step": 3},
    )
    names = ("offloaded_tensors/rank00/m.swp", "offloaded_tensors/rank00/e.swp", "o.pt", "p.pt")
    files = {name: FileSeal(size=64, digest="0" * 32, chunks="") for name in names}
    listed = {name: FileRecord(size=64, digest="0" * 32 if name == "o.pt" else None) for name in names}
    record = RankRecord(
        checkpoint_id="c",
        tag="t",
        rank=0,
        world_size=1,
        optimizer="DeepSpeedCPUAdam",
        master_dtype="float32",
        optim_file="o.pt",
        model_file="p.pt",
        sub_groups=(group,),
        files=listed,
    )
    seal = Seal(checkpoint_id="c", rank=0, record_digest="0" * 32, files=files)
    counter = AdamCounter(role="optimizer", beta1=0.9, beta2=0.95, anchor=0, step=3)
    return record, seal, Extras(checkpoint_id="c", rank=0, micro_steps=3, adam=(counter,))


def group_with(**changes: Any) -> Callable[[Trio], Trio]:
    def change(trio: Trio) -> Trio:
        group = trio[0].sub_groups[0].model_copy(update=changes)
        return trio[0].model_copy(update={"sub_groups": (group,)}), trio[1], trio[2]

    return change


def record_with(**changes: Any) -> Callable[[Trio], Trio]:
    return lambda trio: (trio[0].model_copy(update=changes), trio[1], trio[2])


def unsealed(name: str) -> Callable[[Trio], Trio]:
    return lambda t: (
        t[0],
        t[1].model_copy(update={"files": {k: v for k, v in t[1].files.items() if k != name}}),
        t[2],
    )


def sealed_with(name: str, **changes: Any) -> Callable[[Trio], Trio]:
    def change(trio: Trio) -> Trio:
        files = {**trio[1].files, name: trio[1].files[name].model_copy(update=changes)}
        return trio[0], trio[1].model_copy(update={"files": files}), trio[2]

    return change


def unlisted(name: str) -> Callable[[Trio], Trio]:
    return lambda t: (
        t[0].model_copy(update={"files": {k: v for k, v in t[0].files.items() if k != name}}),
        t[1].model_copy(update={"files": {k: v for k, v in t[1].files.items() if k != name}}),
        t[2],
    )


def adam_step(step: int) -> Callable[[Trio], Trio]:
    return lambda t: (
        t[0],
        t[1],
        t[2].model_copy(update={"adam": (t[2].adam[0].model_copy(update={"step": step}),)}),
    )


MASTER_TENSOR, FIRST, SECOND = sound()[0].sub_groups[0].tensors

BROKEN: dict[str, Callable[[Trio], Trio]] = {
    "a swap file without a hash": unsealed("offloaded_tensors/rank00/e.swp"),
    "the optimizer file without a hash": unsealed("o.pt"),
    "a swap file that is not listed": unlisted("offloaded_tensors/rank00/m.swp"),
    "the model file not listed": unlisted("p.pt"),
    "another size in the seal": sealed_with("offloaded_tensors/rank00/m.swp", size=65),
    "another digest in the seal": sealed_with("o.pt", digest="1" * 32),
    "two tensors in one swap file": group_with(
        tensors=(MASTER_TENSOR, tensor("exp_avg", "offloaded_tensors/rank00/m.swp"), SECOND)
    ),
    "no master": group_with(tensors=(FIRST, SECOND)),
    "a key twice": group_with(
        tensors=(MASTER_TENSOR, FIRST, FIRST.model_copy(update={"file": "o.pt", "where": "pt"}))
    ),
    "too many elements": group_with(numel=1 << 60),
    "bytes that do not fit": group_with(
        tensors=(MASTER_TENSOR.model_copy(update={"nbytes": 100}), FIRST, SECOND)
    ),
    "a tensor of another size": group_with(
        tensors=(MASTER_TENSOR, FIRST, tensor("exp_avg_sq", "o.pt", "pt", 9))
    ),
    "larger than its file": group_with(
        numel=32, tensors=(tensor(MASTER, "offloaded_tensors/rank00/m.swp", numel=32),)
    ),
    "an unknown dtype": group_with(
        tensors=(MASTER_TENSOR.model_copy(update={"dtype": "foo"}), FIRST, SECOND)
    ),
    "a step that is no number": group_with(scalars={"step": "x"}),
    "sub-groups out of order": group_with(index=1),
    "no ranks": record_with(world_size=0),
    "steps without end": adam_step(1 << 50),
    "steps before the anchor": lambda t: (
        t[0],
        t[1],
        t[2].model_copy(update={"adam": (t[2].adam[0].model_copy(update={"anchor": 9}),)}),
    ),
}


def test_sound_records_pass() -> None:
    integrity.check(*sound(), "r")
    record, _, extras = sound()
    integrity.check(record, None, extras, "r")


@pytest.mark.parametrize("name", BROKEN)
def test_contradictions_are_refused(name: str) -> None:
    with pytest.raises(CorruptError, match="contradicts itself"):
        integrity.check(*BROKEN[name](sound()), "r")
