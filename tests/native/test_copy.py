"""Every copy is equal to its source, whatever the sizes, offsets, block size, engine and file system."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvme_resume import _native
from tests.native.reference import CHUNK, check, content, job, run, write

BLOCKS = [4096, 1 << 20, CHUNK, 2 * CHUNK]


@pytest.mark.parametrize("block", BLOCKS)
def test_sizes_around_every_boundary(folder: Path, engine: str, direct: str, block: int) -> None:
    sizes = sorted({0, 1, 511, 512, 4095, 4096, 4097, block - 1, block, block + 1, CHUNK + 4097})
    data = {size: content(size) for size in sizes}
    jobs = [job(write(folder / f"src{size}", data[size]), folder / f"dst{size}") for size in sizes]

    results = run(*jobs, engine=engine, direct=direct, block_bytes=block)

    for size, result in zip(sizes, results, strict=True):
        assert (folder / f"dst{size}").read_bytes() == data[size]
        check(result, data[size])
        assert result.engine == engine


def test_reading_only_gives_the_same_digests(folder: Path, engine: str, direct: str) -> None:
    data = content(2 * CHUNK + 12345)
    src = write(folder / "src", data)
    (result,) = run(job(src), engine=engine, direct=direct)
    check(result, data)
    assert list(folder.iterdir()) == [src]


def test_many_small_files(folder: Path, engine: str) -> None:
    data = [content(17 * i, seed=i) for i in range(200)]
    jobs = [job(write(folder / f"src{i}", d), folder / f"dst{i}") for i, d in enumerate(data)]
    results = run(*jobs, engine=engine, block_bytes=1 << 20, sync=False)
    for i, d in enumerate(data):
        assert (folder / f"dst{i}").read_bytes() == d
        check(results[i], d)


@pytest.mark.parametrize("in_flight", [1, 3, 64])
def test_one_file_through_any_number_of_lanes(disk: Path, engine: str, in_flight: int) -> None:
    data = content(5 * CHUNK + 1)
    src, dst = write(disk / "lanes-src", data), disk / "lanes-dst"
    (result,) = run(job(src, dst), engine=engine, in_flight=in_flight, block_bytes=1 << 20)
    assert dst.read_bytes() == data
    check(result, data)


def test_no_jobs() -> None:
    assert run() == []


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    length=st.integers(0, CHUNK + 70_000) | st.integers(0, 9000),
    src_offset=st.integers(0, 9000) | st.sampled_from([0, 512, 4096, 8192]),
    dst_offset=st.integers(0, 9000) | st.sampled_from([0, 512, 4096, 8192]),
    after=st.integers(0, 5000),
    block=st.sampled_from([4096, 65536, CHUNK]),
    to_end=st.booleans(),
)
def test_any_range(
    disk: Path,
    engine: str,
    direct: str,
    length: int,
    src_offset: int,
    dst_offset: int,
    after: int,
    block: int,
    to_end: bool,
) -> None:
    source = content(src_offset + length + after)
    old = content(7000, seed=1)
    with tempfile.TemporaryDirectory(dir=disk) as name:
        src, dst = write(Path(name, "src"), source), write(Path(name, "dst"), old)
        asked = job(src, dst, src_offset=src_offset, dst_offset=dst_offset, length=-1 if to_end else length)
        (result,) = run(asked, engine=engine, direct=direct, block_bytes=block, sync=False)
        copied = dst.read_bytes()
    moved = source[src_offset:] if to_end else source[src_offset : src_offset + length]
    check(result, moved)
    assert copied == old[:dst_offset].ljust(dst_offset, b"\0") + moved


ranges = st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 20_000)), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ranges=ranges, old_length=st.integers(0, 60_000), aligned=st.booleans(), data=st.data())
def test_many_ranges_into_one_file(
    disk: Path,
    engine: str,
    direct: str,
    ranges: list[tuple[int, int]],
    old_length: int,
    aligned: bool,
    data: st.DataObject,
) -> None:
    """Neighbours share sectors, pages and blocks; no write may bring back what another has replaced."""
    expected = bytearray(content(old_length, seed=7))
    with tempfile.TemporaryDirectory(dir=disk) as name:
        dst = write(Path(name, "dst"), bytes(expected))
        jobs, position = [], 0
        for i, (gap, length) in enumerate(ranges):
            position += gap
            if aligned:
                position = (position + 511) // 512 * 512
            piece = content(length, seed=i)
            src = write(Path(name, f"src{i}"), piece)
            jobs.append(job(src, dst, dst_offset=position, truncate=False))
            if length > 0:
                expected.extend(bytes(max(0, position + length - len(expected))))
                expected[position : position + length] = piece
            position += length
        jobs = data.draw(st.permutations(jobs))
        run(*jobs, engine=engine, direct=direct, block_bytes=4096, in_flight=8, sync=False)
        assert dst.read_bytes() == bytes(expected)


def test_truncate_first_then_ranges_into_the_same_file(disk: Path, engine: str) -> None:
    data = content(50_000)
    src = write(disk / "assemble-src", data)
    dst = write(disk / "assemble-dst", content(90_000, seed=1))
    parts = [job(src, dst, src_offset=0, length=50_000)]
    parts += [
        job(src, dst, src_offset=i, dst_offset=50_000 + i, length=10_000, truncate=False)
        for i in range(0, 50_000, 10_000)
    ]
    run(*parts, engine=engine, block_bytes=4096)
    assert dst.read_bytes() == data + data


def test_truncate_cuts_what_lies_behind_and_keeps_what_lies_before(folder: Path) -> None:
    src = write(folder / "src", b"new")
    dst = write(folder / "dst", b"0123456789")
    run(job(src, dst, dst_offset=4))
    assert dst.read_bytes() == b"0123new"


def test_an_empty_range_with_truncate_sets_the_size(folder: Path) -> None:
    src, dst = write(folder / "src", b""), folder / "dst"
    run(job(src, dst, dst_offset=5000))
    assert dst.read_bytes() == bytes(5000)


def test_without_truncate_the_file_must_exist_and_keeps_its_size(folder: Path) -> None:
    src = write(folder / "src", b"new")
    with pytest.raises(FileNotFoundError) as caught:
        run(job(src, folder / "dst", truncate=False))
    assert caught.value.filename == str(folder / "dst")
    dst = write(folder / "dst", b"0123456789")
    run(job(src, dst, dst_offset=4, truncate=False))
    assert dst.read_bytes() == b"0123new789"


def test_new_files_get_the_mode_that_umask_allows(folder: Path) -> None:
    src = write(folder / "src", b"x")
    before = os.umask(0o027)
    try:
        run(job(src, folder / "dst"))
    finally:
        os.umask(before)
    assert (folder / "dst").stat().st_mode & 0o777 == 0o640


def test_space_is_allocated_not_sparse(disk: Path) -> None:
    src, dst = write(disk / "zeros", bytes(CHUNK)), disk / "zeros-copy"
    run(job(src, dst))
    assert dst.stat().st_blocks * 512 >= CHUNK


def test_without_hash_there_are_no_digests(folder: Path, engine: str) -> None:
    src, dst = write(folder / "src", content(CHUNK + 5)), folder / "dst"
    (result,) = run(job(src, dst), engine=engine, hash=False)
    assert (result.digest, result.chunk_digests) == ("", b"")
    assert dst.read_bytes() == src.read_bytes()


def test_direct_says_what_was_done(disk: Path, memory: Path, engine: str) -> None:
    data = content(CHUNK + 100)
    for place, mode, expected in [
        (disk, "auto", True),
        (disk, "on", True),
        (disk, "off", False),
        (memory, "auto", False),
    ]:
        src, dst = write(place / "says-src", data), place / "says-dst"
        (result,) = run(job(src, dst), engine=engine, direct=mode)
        assert result.direct is expected, (place, mode)


def test_odd_offsets_are_buffered(disk: Path) -> None:
    src = write(disk / "odd", content(CHUNK))
    assert run(job(src, src_offset=4096))[0].direct is True
    assert run(job(src, src_offset=100))[0].direct is False


def test_across_file_systems(disk: Path, memory: Path, engine: str) -> None:
    data = content(3 * CHUNK + 77)
    there = write(disk / "across", data)
    run(job(there, memory / "across"), engine=engine)
    run(job(memory / "across", disk / "back"), engine=engine)
    assert (disk / "back").read_bytes() == data


def test_file_names_that_are_not_utf8(folder: Path) -> None:
    src, dst = folder / os.fsdecode(b"s\xff"), folder / os.fsdecode(b"d\xfe")
    write(src, b"abc")
    asked = job(src, dst)
    assert (asked.src, asked.dst) == (str(src), str(dst))
    run(asked)
    assert dst.read_bytes() == b"abc"


def test_progress_ends_at_the_total(folder: Path, engine: str) -> None:
    src = write(folder / "src", content(CHUNK + 5))
    transfer = _native.Transfer([job(src, folder / "dst"), job(src)], engine=engine, block_bytes=65536)
    assert transfer.progress() == (0, 0)
    transfer.run()
    assert transfer.progress() == (2 * (CHUNK + 5), 2 * (CHUNK + 5))


def test_bandwidth_limit_changes_nothing_but_the_pace(folder: Path, engine: str) -> None:
    data = content(300_000)
    src, dst = write(folder / "src", data), folder / "dst"
    (result,) = run(job(src, dst), engine=engine, block_bytes=4096, bandwidth_limit=3_000_000)
    assert dst.read_bytes() == data
    check(result, data)
