"""The versioned JSON records of a checkpoint, and how they are read safely.

Each record is stored in an envelope ``{"kind", "format", "digest", "body"}``; ``digest`` is the XXH3-128 of the
canonical JSON of the body, so that a flipped bit in a record is found without any other file.  No pickle.
Shapes are tuples of ints, sizes and offsets are bytes unless a name says elements, dtypes are torch names
without the ``torch.`` prefix.  Nothing here touches a disk; the sizes of hostile input are bounded here.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_json

from nvme_resume.errors import CorruptError, IncompatibleError

FORMAT = 1
MAX_RECORD_BYTES = 256 << 20
_MOST_FORMATS = 1_000_000  # a number beyond is damage, not the future
MASTER = "fp32_master"  # key of the master weights beside exp_avg, exp_avg_sq, ...

Count = Annotated[int, Field(ge=0, lt=1 << 62)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Scalar = int | float | bool | str | None


class Record(BaseModel):
    """Base of all records: unknown fields are refused, values cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    KIND: ClassVar[str] = ""


class ParamRecord(BaseModel):
    """One trainable parameter inside a sub-group, by NAME (never by ``ds_id``).

    ``offset`` and ``partition_numel`` are elements in the flat partition of the sub-group; ``padding`` is how
    many of them at the end of this rank's partition are beyond the parameter.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    shape: tuple[Count, ...]
    numel: Count
    partition_numel: Count
    offset: Count
    padding: Count


class TensorRecord(BaseModel):
    """Where one flat tensor of a sub-group is kept.

    ``where="swap"``: ``nbytes`` bytes at the start of swap file ``file``.  ``where="pt"``: in DeepSpeed's
    optimizer file ``file`` (its ``optimizer_state_dict``).  ``flat`` is False for tensors that do not have one
    element per parameter element (torch's ``step`` tensors).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    key: str
    dtype: str
    numel: Count
    where: Literal["swap", "pt"]
    file: str
    nbytes: Count
    flat: bool = True


class SubGroupRecord(BaseModel):
    """One sub-group: its parameters in order, its flat tensors, its plain values (``step``)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    index: Count
    param_group: Count
    state_index: Count  # index in DeepSpeed's packed optimizer state dict
    numel: Count
    params: tuple[ParamRecord, ...]
    tensors: tuple[TensorRecord, ...]
    scalars: dict[str, Scalar] = Field(default_factory=dict)


class FrozenRecord(BaseModel):
    """One parameter the optimizer does not own.  ``file`` is None when DeepSpeed's model file holds it."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    shape: tuple[Count, ...]
    numel: Count
    partition_numel: Count
    dtype: str
    file: str | None = None


class FileRecord(BaseModel):
    """One file of a rank as it was at the commit.

    ``digest`` is there when it was known by then.  ``inode`` and ``mtime_ns`` are those of a swap file that was linked,
    not copied: while the inode is the same the time must be, too, or somebody has written to it since.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    size: Count
    digest: Digest | None = None
    inode: Count | None = None
    mtime_ns: Count | None = None


class RankRecord(Record):
    """What one rank saved.  ``files`` lists every file but the records themselves."""

    KIND: ClassVar[str] = "rank"
    checkpoint_id: str
    tag: str
    rank: Count
    world_size: Count
    optimizer: str
    master_dtype: str
    optim_file: str
    model_file: str
    sub_groups: tuple[SubGroupRecord, ...]
    frozen: tuple[FrozenRecord, ...] = ()
    files: dict[str, FileRecord] = Field(default_factory=dict)


class FileSeal(BaseModel):
    """Size and hash of one file; ``digest`` is the hash of the chunk hashes (see docs/FORMAT.md)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    size: Count
    digest: Digest
    chunks: str  # hexadecimal, 32 digits for each 4 MiB chunk


class Seal(Record):
    """Hashes of all files of one rank, bound to its record and checkpoint."""

    KIND: ClassVar[str] = "seal"
    checkpoint_id: str
    rank: Count
    record_digest: Digest
    files: dict[str, FileSeal]


class AdamCounter(BaseModel):
    """Hidden state of one DeepSpeedCPUAdam object: how its running beta^t came about.

    The C++ object holds ``pow(beta, anchor)`` multiplied ``step - anchor`` times by beta in float32
    (DeepSpeed 0.19.8, ``csrc/includes/cpu_adam.h::IncrementStep``).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    role: str
    beta1: float
    beta2: float
    anchor: Count
    step: Count


class Accumulation(BaseModel):
    """A save in the middle of an accumulation window: the gradients themselves are in the extras tensors."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    micro_step_id: Count
    epilogue_ran: bool
    active_params: tuple[str, ...]


class Extras(Record):
    """Small Python-side state of one rank that DeepSpeed does not save."""

    KIND: ClassVar[str] = "extras"
    checkpoint_id: str
    rank: Count
    micro_steps: Count
    adam: tuple[AdamCounter, ...] = ()
    accumulation: Accumulation | None = None
    grad_scaler: dict[str, Scalar] | None = None
    python_rng: list[Any] | None = None
    numpy_rng: dict[str, Any] | None = None
    tensors_file: str | None = None


class RankEntry(BaseModel):
    """One rank in the manifest: the digests that its record and extras must have."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    rank: Count
    host: str
    record: Digest
    extras: Digest


class Manifest(Record):
    """Written last: a folder with a sound manifest is a complete checkpoint.

    ``sealed``: every rank's seal was there before the manifest, so one that is missing has been lost.
    """

    KIND: ClassVar[str] = "manifest"
    checkpoint_id: str
    tag: str
    global_steps: Count
    world_size: Count
    sealed: bool
    created: str
    versions: dict[str, str]
    settings: dict[str, Scalar]
    ranks: tuple[RankEntry, ...]


def same_checkpoint(one: Manifest, other: Manifest) -> bool:
    """Are they of one save?  Older versions let every node write its own time of day."""
    return (one.checkpoint_id, one.tag, one.ranks) == (other.checkpoint_id, other.tag, other.ranks)


R = TypeVar("R", bound=Record)


def _canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def digest_of(record: Record) -> str:
    """XXH3-128 (hex) of a record's canonical JSON."""
    return xxhash.xxh3_128_hexdigest(_canonical(record.model_dump(mode="json")))


def encode(record: Record) -> bytes:
    """The bytes of a record file."""
    body = record.model_dump(mode="json")
    digest = xxhash.xxh3_128_hexdigest(_canonical(body))
    envelope = {"kind": record.KIND, "format": FORMAT, "digest": digest, "body": body}
    return to_json(envelope, indent=1) + b"\n"


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate key")
    return found


def decode(kind: type[R], data: bytes, path: str) -> R:
    """Parse and check the bytes of a record file.

    Raises CorruptError when it is not the record it claims to be, IncompatibleError when a newer
    nvme_resume wrote it.
    """
    if len(data) > MAX_RECORD_BYTES:
        raise CorruptError(
            "record is too large", path=path, expected=f"<= {MAX_RECORD_BYTES}", found=len(data)
        )
    try:
        envelope = json.loads(data.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"record is not JSON: {error}", path=path, hint=_OLDER) from None
    if not isinstance(envelope, dict) or set(envelope) != {"kind", "format", "digest", "body"}:
        raise CorruptError("not a record of nvme_resume", path=path, hint=_OLDER)
    if envelope["kind"] != kind.KIND:
        found = str(envelope["kind"])[:80]
        raise CorruptError("wrong kind of record", path=path, expected=kind.KIND, found=found)
    version = envelope["format"]
    if not isinstance(version, int) or not 1 <= version < _MOST_FORMATS:
        raise CorruptError("bad format number", path=path, expected=f"1..{FORMAT}", found=str(version)[:80])
    if version > FORMAT:
        raise IncompatibleError(
            "written by a newer nvme_resume",
            path=path,
            expected=f"<= {FORMAT}",
            found=version,
            hint="upgrade it",
        )
    try:
        body = _canonical(envelope["body"])
    except RecursionError:
        raise CorruptError("record is nested too deeply", path=path, hint=_OLDER) from None
    digest = xxhash.xxh3_128_hexdigest(body)
    if digest != envelope["digest"]:
        raise CorruptError(
            "record was changed after it was written",
            path=path,
            expected=str(envelope["digest"])[:80],
            found=digest,
            hint=_OLDER,
        )
    try:
        # Strict: what was written as a number is a number.  Nesting ends at 200.
        return kind.model_validate_json(body, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CorruptError(
            f"bad value in record at {where[:200]}: {first['msg'][:200]}", path=path, hint=_OLDER
        ) from None


_OLDER = "load an older tag of the same folder by its name"
