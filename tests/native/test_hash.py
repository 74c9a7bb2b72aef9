"""The digests are those of the PyPI xxhash package, and a constant of the format."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from nvme_resume import _native
from tests.native.reference import CHUNK, check, content, job, run, write


def test_chunk_size_is_part_of_the_format() -> None:
    assert _native.CHUNK_BYTES == 4194304


@given(st.lists(st.binary(min_size=16, max_size=16), max_size=40).map(b"".join))
def test_digest_of_chunks(digests: bytes) -> None:
    assert _native.digest_of_chunks(digests) == xxhash.xxh3_128(digests).hexdigest()


def test_known_values() -> None:
    assert _native.digest_of_chunks(b"") == "99aa06d3014798d86001c324468d497f"


def test_digests_must_be_whole() -> None:
    with pytest.raises(ValueError, match="16"):
        _native.digest_of_chunks(bytes(17))


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 1])
def test_block_size_does_not_matter(memory: Path, engine: str, length: int) -> None:
    data = content(length)
    src = write(memory / "blocks", data)
    for block in (4096, 65536, CHUNK, 4 * CHUNK):
        check(run(job(src), engine=engine, block_bytes=block)[0], data)


def test_chunks_count_from_the_start_of_the_range(memory: Path, engine: str) -> None:
    data = content(2 * CHUNK + 999)
    src = write(memory / "from-start", data)
    check(run(job(src, src_offset=999), engine=engine)[0], data[999:])
    check(run(job(src, src_offset=4096, length=CHUNK + 1), engine=engine)[0], data[4096 : 4096 + CHUNK + 1])
