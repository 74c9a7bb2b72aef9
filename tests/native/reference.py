"""What the copier has to do, said in plain Python, and short ways to call it."""

from __future__ import annotations

import random
from pathlib import Path

import xxhash

from nvme_resume import _native

CHUNK = 4 << 20


def chunk_digests(data: bytes) -> bytes:
    return b"".join(xxhash.xxh3_128(data[i : i + CHUNK]).digest() for i in range(0, len(data), CHUNK))


def digest(data: bytes) -> str:
    return xxhash.xxh3_128(chunk_digests(data)).hexdigest()


def content(length: int, seed: int = 0) -> bytes:
    return random.Random(f"{length}/{seed}").randbytes(length)


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def job(src: Path, dst: Path | None = None, **range_: int) -> _native.Job:
    return _native.Job(str(src), None if dst is None else str(dst), **range_)


def run(*jobs: _native.Job, **options: object) -> list[_native.FileResult]:
    return _native.Transfer(jobs, **options).run()


def check(result: _native.FileResult, data: bytes) -> None:
    assert result.bytes == len(data)
    assert result.chunk_digests == chunk_digests(data)
    assert result.digest == digest(data)
