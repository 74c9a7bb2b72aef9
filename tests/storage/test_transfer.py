"""Transfers through the package's own face: errors in our words, and Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest

from nvme_resume.config import Options
from nvme_resume.errors import CorruptError
from nvme_resume.storage import transfer, verify


def test_a_short_source_names_file_and_offset(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 5000)
    with pytest.raises(CorruptError) as caught:
        transfer.run(
            [transfer.Copy(tmp_path / "a", tmp_path / "b", nbytes=9000)], Options(), what="test", sync=False
        )
    assert caught.value.path == str(tmp_path / "a")


def test_interrupt_stops_a_slow_transfer(tmp_path: Path) -> None:
    # A job in the background of a shell starts with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    (tmp_path / "a").write_bytes(b"x" * (64 << 20))
    options = Options(bandwidth_limit_mib=1.0, block_mib=1)
    threading.Timer(0.7, lambda: signal.raise_signal(signal.SIGINT)).start()
    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            transfer.run([transfer.Copy(tmp_path / "a", tmp_path / "b")], options, what="test", sync=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start < 20  # the whole would take a minute


def test_the_first_bad_chunk_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a"
    data = bytearray(b"x" * (9 << 20))
    path.write_bytes(data)
    (sealed,) = transfer.run([transfer.Copy(path)], Options(), what="test", sync=False)
    data[5 << 20] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError) as caught:
        verify.full(tmp_path, {"a": sealed}, Options(), rank=0, tag="t")
    assert caught.value.offset == 4 << 20
