"""Every file and folder name of the format, made in one place.

Names only: nothing here touches a disk.  DeepSpeed's own names (0.19.8, ``runtime/engine.py``) are repeated
where we must find its files.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

LATEST = "latest"
TRAINER_STATE = "trainer_state.json"  # beside a tag folder: the save folder is a Trainer's checkpoint-N
RECORDS = "nvme_resume"  # folder of our records inside <tag>/
SWAP = "offloaded_tensors"  # DeepSpeed's folder for swap files inside <tag>/
PARAMS = "offloaded_params"  # our folder for frozen 16-bit parameters that live on NVMe
MANIFEST = "manifest.json"
STAGING_PREFIX = ".tmp-"
RETIRED_PREFIX = ".old-"
PRIVATE = "nvme_resume"  # beside DeepSpeed's swap folders: swap files under names nobody else opens
DOWNLOADS = "nvme_resume_downloads"  # beside it: checkpoints on their way from a URL
OWNER_LOCK = ".lock"  # suffix: held by the process that owns the folder of that name
OWNER_NOTE = ".owner"  # suffix: says in words who holds the lock of that name
INTRUDER = ".intruder"  # suffix: left by a job that was refused the swap folder after it had written there
WRITER_LOCK = f".nvme_resume{OWNER_LOCK}"  # in a save folder: held by the job that saves there
WRITER_NOTE = f".nvme_resume{OWNER_NOTE}"
FAILED = "failed"  # suffix of the mark a rank leaves when its part of a background save went wrong

_SWAP_FILE = re.compile(r"^(?:(?P<key>[A-Za-z_]\w*)-)?(?P<first>\d+)_(?P<last>\d+)\.tensor\.swp$")


def rank_folder(rank: int) -> str:
    """``rank00``: DeepSpeed's folder name for one rank (``dp_index_to_str``, two digits at least)."""
    return f"rank{rank:02d}"


def parse_swap_file(name: str) -> tuple[str | None, int, int] | None:
    """Split ``exp_avg-3_9.tensor.swp`` into ``("exp_avg", 3, 9)``; a master file has no key.

    The numbers are the ``ds_id`` of the first and last parameter of the sub-group in the process that wrote
    the file (DeepSpeed 0.19.8, ``stage3.py::_create_fp32_partitions``).  None for any other name, gradient
    files (``..._gradient_...``) included.
    """
    match = _SWAP_FILE.match(name)
    if match is None:
        return None
    return match["key"], int(match["first"]), int(match["last"])


def swap_path(rank: int, name: str) -> str:
    """Path of a swap file relative to the tag folder (POSIX separators)."""
    return str(PurePosixPath(SWAP, rank_folder(rank), name))


def frozen_path(rank: int, index: int) -> str:
    """Path of a frozen NVMe parameter's partition relative to the tag folder."""
    return str(PurePosixPath(PARAMS, rank_folder(rank), f"{index:06d}.param.swp"))


def rank_record(rank: int) -> str:
    """Path of a rank's record relative to the tag folder."""
    return str(PurePosixPath(RECORDS, f"{rank_folder(rank)}.json"))


def failure(rank: int) -> str:
    """Path of the mark that a rank's part of a background save failed, relative to the tag folder."""
    return str(PurePosixPath(RECORDS, f"{rank_folder(rank)}.{FAILED}"))


def private_root(swap_folder: Path) -> Path:
    """Where the private names of a swap folder's files live.

    Beside ``optimizer/`` and ``<dtype>params/`` in ``<nvme_path>/zero_stage_3``: plain DeepSpeed copies the first with
    all that is in it into its checkpoints and empties the second when it starts (0.19.8).
    """
    return swap_folder.parent.parent / PRIVATE


def swap_lock(swap_folder: Path) -> Path:
    """The lock file of whoever swaps a rank's tensors below an ``nvme_path``."""
    return private_root(swap_folder) / f"{swap_folder.name}{OWNER_LOCK}"


def intruder(swap_folder: Path) -> Path:
    """The note of a job that wrote to a swap folder of another before it was refused."""
    return private_root(swap_folder) / f"{swap_folder.name}{INTRUDER}"


def swap_folder(nvme_path: Path, rank: int) -> Path:
    """Where DeepSpeed swaps a rank's optimizer state (0.19.8, ``optimizer_utils.py``)."""
    return nvme_path / "zero_stage_3" / "optimizer" / f"rank{rank}"


def seal(rank: int) -> str:
    """Path of a rank's seal (sizes and hashes of its files) relative to the tag folder."""
    return str(PurePosixPath(RECORDS, f"{rank_folder(rank)}.seal.json"))


def extras(rank: int) -> str:
    """Path of a rank's small Python-side state relative to the tag folder."""
    return str(PurePosixPath(RECORDS, f"{rank_folder(rank)}.extras.json"))


def extras_tensors(rank: int) -> str:
    """Path of the tensors that belong to a rank's extras, relative to the tag folder."""
    return str(PurePosixPath(RECORDS, f"{rank_folder(rank)}.extras.safetensors"))


def manifest() -> str:
    """Path of the manifest relative to the tag folder."""
    return str(PurePosixPath(RECORDS, MANIFEST))


def staging(tag: str, save_id: str) -> str:
    """Name, inside the save folder, of a checkpoint that is being written."""
    return f"{STAGING_PREFIX}{tag}.{save_id}"


def partial(path: Path) -> Path:
    """Where a file is written that gets its name when all of it is there."""
    return path.with_name(f"{STAGING_PREFIX}{path.name}")


def retired(tag: str, save_id: str) -> str:
    """Name of a replaced checkpoint on its way out, where folders cannot be exchanged atomically."""
    return f"{RETIRED_PREFIX}{tag}.{save_id}"


def retired_tag(name: str) -> str | None:
    """The tag of a replaced checkpoint on its way out, or None for any other name."""
    return name.removeprefix(RETIRED_PREFIX).rpartition(".")[0] if name.startswith(RETIRED_PREFIX) else None


def removed(retired_name: str) -> str:
    """Name of a replaced checkpoint that has no way back: its files are being removed."""
    return f"{STAGING_PREFIX}{retired_name.removeprefix(RETIRED_PREFIX)}.removed"


def is_leftover(name: str) -> bool:
    """True for a folder that only an interrupted save can have left behind."""
    return name.startswith((STAGING_PREFIX, RETIRED_PREFIX))


def optim_states(rank: int, bf16: bool) -> str:
    """DeepSpeed's optimizer file of one rank (0.19.8, ``engine.py::_get_rank_zero_ckpt_name``)."""
    return f"{'bf16_' if bf16 else ''}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def model_states(rank: int) -> str:
    """DeepSpeed's model file of one rank under ZeRO-3 (0.19.8, ``engine.py::_get_ckpt_name``)."""
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"


def inside(folder: Path, relative: str) -> Path | None:
    """``folder / relative`` if that stays inside the folder, else None.

    Records are data from outside: an absolute path, a ``..`` or a NUL must not lead out of the checkpoint.
    Symbolic links are refused where files are opened, not here.
    """
    pure = PurePosixPath(relative)
    if not relative or "\0" in relative or pure.is_absolute() or ".." in pure.parts:
        return None
    return folder.joinpath(*pure.parts)


def valid_tag(tag: str) -> bool:
    """A tag is one plain folder name that cannot be confused with our own temporary names."""
    return (
        bool(tag) and tag not in (".", "..") and "/" not in tag and "\0" not in tag and not is_leftover(tag)
    )
