"""Is what lies in a checkpoint folder what was saved?

In levels: structure (records and sizes), sampled (some chunks of every file as well), full (every byte).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from nvme_resume import layout
from nvme_resume.config import Options
from nvme_resume.errors import CorruptError
from nvme_resume.manifest import FileRecord, FileSeal
from nvme_resume.storage import disk as seam
from nvme_resume.storage import transfer

HASH_CHUNK_BYTES = 4 << 20  # constant of the format
_DIGEST_CHARACTERS = 32  # of one chunk, in hexadecimal
_SAMPLES = 4  # chunks of a file, beside the first and the last
_dice = random.Random()  # its own: the training's random states are none of our business


def path_of(folder: Path, relative: str, *, rank: int, tag: str) -> Path:
    """The file a record names, refused when it leads out of the checkpoint or through a symbolic link."""
    path = layout.inside(folder, relative)
    if path is None:
        raise CorruptError("record names a file outside the checkpoint", rank=rank, tag=tag, path=relative)
    step = folder
    for part in Path(relative).parts:
        step = step / part
        try:
            leads_away = step.is_symlink()
        except OSError as error:  # a name no file can have
            raise CorruptError(
                f"record names an impossible file: {error.strerror}", rank=rank, tag=tag, path=relative[:200]
            ) from None
        if leads_away:
            raise CorruptError("record leads through a symbolic link", rank=rank, tag=tag, path=str(step))
    return path


def structure(
    folder: Path, files: Mapping[str, FileSeal] | Mapping[str, FileRecord], *, rank: int, tag: str
) -> None:
    """Every file is there and has its size."""
    for relative, known in files.items():
        check_size(path_of(folder, relative, rank=rank, tag=tag), known.size, rank=rank, tag=tag)


def untouched(folder: Path, files: Mapping[str, FileRecord], *, rank: int, tag: str) -> None:
    """What can be said of files without hashes: those that were linked were not written to since the commit."""
    for relative, listed in files.items():
        check_untouched(path_of(folder, relative, rank=rank, tag=tag), listed, rank=rank, tag=tag)


def check_untouched(path: Path, listed: FileRecord, *, rank: int, tag: str) -> None:
    """CorruptError when a linked file has the inode of the commit but was written to since."""
    if listed.inode is None:
        return
    now = seam.current().identity(path)
    if now.inode == listed.inode and (now.size, now.mtime_ns) != (listed.size, listed.mtime_ns):
        raise CorruptError(
            "a saved swap file was written to after the commit",
            rank=rank,
            tag=tag,
            path=str(path),
            expected=f"{listed.size} bytes, modified at {listed.mtime_ns} ns",
            found=f"{now.size} bytes, modified at {now.mtime_ns} ns",
            hint="nothing but nvme_resume may write below the checkpoint or nvme_path; load an older tag by its name",
        )


def check_size(path: Path, size: int, *, rank: int, tag: str) -> None:
    """CorruptError unless ``path`` is a regular file of exactly ``size`` bytes."""
    try:
        found: object = seam.current().size(path)
    except OSError as error:
        found = error.strerror or "unreadable"
    if found != size:
        raise CorruptError(
            "file is missing or has the wrong size",
            rank=rank,
            tag=tag,
            path=str(path),
            expected=f"{size} bytes",
            found=found,
            hint="load an older tag of the same folder by its name",
        )


def compare(path: Path, sealed: FileSeal, found: FileSeal, *, rank: int, tag: str) -> None:
    """CorruptError, naming the first bad 4 MiB chunk, unless the hashes agree."""
    if (sealed.size, sealed.digest) == (found.size, found.digest):
        return
    offset = None
    # Without chunk hashes (all there was at the commit) the place is not known.
    for index in range(0, max(len(sealed.chunks), len(found.chunks)) if sealed.chunks else 0, 32):
        if sealed.chunks[index : index + 32] != found.chunks[index : index + 32]:
            offset = index // 32 * HASH_CHUNK_BYTES
            break
    raise CorruptError(
        "content differs from what was saved (first bad chunk at the offset)",
        rank=rank,
        tag=tag,
        path=str(path),
        offset=offset,
        expected=sealed.digest,
        found=found.digest,
        hint="load an older tag of the same folder by its name",
    )


def full(
    folder: Path,
    files: Mapping[str, FileSeal],
    options: Options,
    *,
    rank: int,
    tag: str,
    show: bool = False,
) -> None:
    """Hash every file and compare."""
    structure(folder, files, rank=rank, tag=tag)
    names = list(files)
    paths = [path_of(folder, name, rank=rank, tag=tag) for name in names]
    found = transfer.run([transfer.Copy(p) for p in paths], options, what="verify", sync=False, show=show)
    for name, path, result in zip(names, paths, found, strict=True):
        compare(path, files[name], result, rank=rank, tag=tag)


class _Sample(NamedTuple):
    """A range of a file and its hash: of the one chunk it is, or of the whole file."""

    path: Path
    offset: int
    size: int
    expected: str
    whole: bool


def sampled(folder: Path, files: Mapping[str, FileSeal], options: Options, *, rank: int, tag: str) -> None:
    """Hash some chunks of every file, other ones each time, and compare; whole files without known chunk hashes."""
    structure(folder, files, rank=rank, tag=tag)
    samples = [
        sample
        for name, known in files.items()
        for sample in _samples(path_of(folder, name, rank=rank, tag=tag), known)
    ]
    reads = [transfer.Copy(s.path, nbytes=s.size, src_offset=s.offset) for s in samples]
    results = transfer.run(reads, options, what="verify", sync=False)
    for sample, result in zip(samples, results, strict=True):
        found = result.digest if sample.whole else result.chunks
        if found != sample.expected:
            raise CorruptError(
                "content differs from what was saved"
                + ("" if sample.whole else " (in the chunk at the offset)"),
                rank=rank,
                tag=tag,
                path=str(sample.path),
                offset=None if sample.whole else sample.offset,
                expected=sample.expected,
                found=found,
                hint="load an older tag of the same folder by its name",
            )


def _samples(path: Path, known: FileSeal) -> Iterator[_Sample]:
    """The first, the last and some other chunks of a file."""
    count = len(known.chunks) // _DIGEST_CHARACTERS
    if count == 0:
        yield _Sample(path, 0, known.size, known.digest, whole=True)
        return
    for index in sorted({0, count - 1, *_dice.sample(range(count), min(count, _SAMPLES))}):
        offset = index * HASH_CHUNK_BYTES
        chunk = known.chunks[index * _DIGEST_CHARACTERS : (index + 1) * _DIGEST_CHARACTERS]
        yield _Sample(path, offset, min(HASH_CHUNK_BYTES, known.size - offset), chunk, whole=False)
