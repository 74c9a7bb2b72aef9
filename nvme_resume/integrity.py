"""Do a rank's records agree with themselves and each other?  Pure; the answer is silence or one CorruptError.

Digests prove that a record is what somebody wrote; this proves that it can mean something: every file it names is
listed, sizes add up, keys and swap files are named once, record and seal agree.  Checked before anything of the
checkpoint is opened.
"""

from __future__ import annotations

from collections.abc import Iterator

from nvme_resume.errors import CorruptError
from nvme_resume.manifest import MASTER, Extras, RankRecord, Seal, SubGroupRecord

ELEMENT_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
    "bool": 1,
}
MOST_REPLAYED_STEPS = 10**9  # CPUAdam steps since the anchor; more would repeat for hours


def check(record: RankRecord, seal: Seal | None, extras: Extras, path: str) -> None:
    """Raise CorruptError naming ``path`` and the first thing that cannot be."""
    for problem, expected, found in _problems(record, seal, extras):
        raise CorruptError(
            f"record contradicts itself: {problem}",
            rank=record.rank,
            tag=record.tag,
            path=path,
            expected=expected,
            found=found,
            hint="load an older tag of the same folder by its name",
        )


def _problems(record: RankRecord, seal: Seal | None, extras: Extras) -> Iterator[tuple[str, object, object]]:
    """(what, expected, found) of everything that is wrong."""
    if record.world_size < 1 or record.rank >= record.world_size:
        yield "world size", f"more than rank {record.rank}", record.world_size
    named = [record.optim_file, record.model_file]
    named += [] if extras.tensors_file is None else [extras.tensors_file]
    named += [f.file for f in record.frozen if f.file is not None]
    named += [t.file for g in record.sub_groups for t in g.tensors]
    for name in named:
        if name not in record.files:
            yield f"{name} is named but not listed", "its size in the list of files", "none"
    if seal is not None:
        yield from _seal_problems(record, seal)
    swap_files: set[str] = set()
    for number, group in enumerate(record.sub_groups):
        if group.index != number:
            yield "sub-group number", number, group.index
        yield from _group_problems(group, record, swap_files)
    for frozen in record.frozen:
        if frozen.dtype not in ELEMENT_BYTES:
            yield f"dtype of {frozen.name}", "a torch dtype", frozen.dtype
    for counter in extras.adam:
        if not 0 <= counter.step - counter.anchor <= MOST_REPLAYED_STEPS:
            yield (
                "CPUAdam steps since the anchor",
                f"0 to {MOST_REPLAYED_STEPS}",
                counter.step - counter.anchor,
            )


def _seal_problems(record: RankRecord, seal: Seal) -> Iterator[tuple[str, object, object]]:
    if seal.files.keys() != record.files.keys():
        name = sorted(seal.files.keys() ^ record.files.keys())[0]
        yield "files in record and seal", "the same", f"{name} in one of them only"
        return
    for name, listed in record.files.items():
        sealed = seal.files[name]
        if listed.size != sealed.size:
            yield f"size of {name} in the seal", listed.size, sealed.size
        if listed.digest not in (None, sealed.digest):
            yield f"digest of {name} in the seal", listed.digest, sealed.digest


def _group_problems(
    group: SubGroupRecord, record: RankRecord, swap_files: set[str]
) -> Iterator[tuple[str, object, object]]:
    where = f"sub-group {group.index}"
    position = 0
    for param in group.params:
        if param.offset != position:
            yield f"{where}, offset of {param.name}", position, param.offset
        position += param.partition_numel
    if position != group.numel:
        yield f"{where}, elements", position, group.numel
    keys = [t.key for t in group.tensors]
    if MASTER not in keys or len(set(keys)) != len(keys):
        yield f"{where}, tensors", f"{MASTER} and others, each once", keys
    for tensor in group.tensors:
        element = ELEMENT_BYTES.get(tensor.dtype)
        if element is None:
            yield f"{where}, dtype of {tensor.key}", "a torch dtype", tensor.dtype
        elif tensor.nbytes != tensor.numel * element:
            yield f"{where}, bytes of {tensor.key}", tensor.numel * element, tensor.nbytes
        if tensor.flat and tensor.numel != group.numel:
            yield f"{where}, elements of {tensor.key}", group.numel, tensor.numel
        if tensor.where == "swap":
            listed = record.files.get(tensor.file)
            if listed is not None and listed.size < tensor.nbytes:
                yield f"{where}, size of {tensor.file}", f">= {tensor.nbytes}", listed.size
            if tensor.file in swap_files:
                yield f"{where}, swap file", "one tensor a file", tensor.file
            swap_files.add(tensor.file)
    step = group.scalars.get("step", 0)
    if isinstance(step, bool) or not isinstance(step, (int, float)):
        yield f"{where}, step", "a number", step
