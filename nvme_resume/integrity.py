"""Do a rank's records agree with themselves and each other?  Pure; the answer is silence or one CorruptError.

Digests prove that a record is what somebody wrote; this proves that it can mean something: every file it names is
listed, sizes add up, keys and swap files are named once, record and seal agree.  Checked before anything of the
checkpoint is opened.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import PurePosixPath

from nvme_resume import layout
from nvme_resume.errors import CorruptError
from nvme_resume.manifest import MASTER, Extras, Manifest, RankRecord, Seal, SubGroupRecord

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
MOST_STEPS = 1 << 62
_MT19937_WORDS = 624
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


def check_manifest(head: Manifest, path: str) -> None:
    """CorruptError unless it lists every rank of its world once, in order."""
    found = [entry.rank for entry in head.ranks]
    if head.world_size < 1 or len(found) != head.world_size or found != list(range(len(found))):
        raise CorruptError(
            "the manifest does not list each rank once",
            tag=head.tag[:200],
            path=path,
            expected=f"ranks 0 to {head.world_size - 1}",
            found=f"{len(found)} entries",
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
    for name in record.files:
        if not _may_list(name, record, extras):
            yield f"{name[:200]!r} is no file of rank {record.rank}", "its own files", "another"
    if seal is not None:
        yield from _seal_problems(record, seal)
    swap_files: set[str] = set()
    for number, group in enumerate(record.sub_groups):
        if group.index != number:
            yield "sub-group number", number, group.index
        yield from _group_problems(group, record, swap_files)
    for frozen in record.frozen:
        if frozen.numel != math.prod(frozen.shape):
            yield f"elements of {frozen.name}", math.prod(frozen.shape), frozen.numel
        if frozen.dtype not in ELEMENT_BYTES:
            yield f"dtype of {frozen.name}", "a torch dtype", frozen.dtype
    for counter in extras.adam:
        if not 0 <= counter.step - counter.anchor <= MOST_REPLAYED_STEPS:
            yield (
                "CPUAdam steps since the anchor",
                f"0 to {MOST_REPLAYED_STEPS}",
                counter.step - counter.anchor,
            )
        if not (0 <= counter.beta1 <= 1 and 0 <= counter.beta2 <= 1):
            yield "CPUAdam betas", "0 to 1", f"{counter.beta1}, {counter.beta2}"
    yield from _rng_problems(extras)


def _may_list(name: str, record: RankRecord, extras: Extras) -> bool:
    """Is this the plain name of a data file of this rank?  Records and other ranks' files are none."""
    if str(PurePosixPath(name)) != name:
        return False
    if name in (record.optim_file, record.model_file):
        return "/" not in name
    if name == extras.tensors_file:
        return name == layout.extras_tensors(record.rank)
    own = layout.rank_folder(record.rank)
    return str(PurePosixPath(name).parent) in (f"{layout.SWAP}/{own}", f"{layout.PARAMS}/{own}")


def _rng_problems(extras: Extras) -> Iterator[tuple[str, object, object]]:
    """Random states are set last, when nothing can be taken back any more: they are tried on here."""
    if extras.python_rng is not None:
        try:
            version, words, gauss = extras.python_rng
            random.Random(0).setstate((version, tuple(words), gauss))
        except (ValueError, TypeError, OverflowError):
            yield "random state of Python", "one of random.getstate()", "another"
    state = extras.numpy_rng
    if state is not None:
        key, pos = state.get("key"), state.get("pos")
        if not (
            state.get("bit_generator") == "MT19937"
            and isinstance(key, list)
            and len(key) == _MT19937_WORDS
            and all(type(word) is int and 0 <= word < 1 << 32 for word in key)
            and type(pos) is int
            and 0 <= pos <= _MT19937_WORDS
            and state.get("has_gauss") in (0, 1)
            and isinstance(state.get("gauss"), float)
        ):
            yield "random state of numpy", "one of numpy.random.get_state()", "another"


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
        if param.numel != math.prod(param.shape):
            yield f"{where}, elements of {param.name}", math.prod(param.shape), param.numel
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
    if isinstance(step, bool) or not isinstance(step, (int, float)) or not 0 <= step < MOST_STEPS:
        yield f"{where}, step", f"a number below {MOST_STEPS}", str(step)[:80]
