"""Work beside training: in order, out of the way, and never silent about a failure."""

from __future__ import annotations

import errno
import shutil
import threading
import time
from pathlib import Path

import pytest

from nvme_resume import _native, layout, manifest
from nvme_resume.config import Options
from nvme_resume.errors import CorruptError, NoSpaceError, NvmeResumeError
from nvme_resume.manifest import FileRecord, RankRecord, Seal
from nvme_resume.storage import disk as seam
from nvme_resume.storage import records, seal, transfer
from nvme_resume.storage.background import Background, Cancelled, Gate
from nvme_resume.storage.limit import Limit

pytestmark = pytest.mark.alone


def fail() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "/x")


def test_failures_wait_for_the_next_call_and_are_raised_once() -> None:
    work = Background()
    done: list[int] = []
    for index in range(3):
        work.submit(f"task {index}", lambda index=index: done.append(index), 1)  # type: ignore[misc]
    work.submit("a copy", fail, 1)
    with pytest.raises(NoSpaceError, match="a copy"):
        work.finish()
    assert done == [0, 1, 2]
    work.raise_failure()
    work.submit("odd", lambda: 1 / 0, 1)  # type: ignore[arg-type, return-value]
    with pytest.raises(NvmeResumeError, match="odd: ZeroDivisionError"):
        work.finish()
    work.close()


def test_a_failure_that_somebody_waits_for_is_theirs_alone() -> None:
    """Every time they ask; an unrelated call does not stumble over it, also not over one that nobody wants any more."""
    work = Background()
    task = work.submit("a check", fail, 1, awaited=True)
    for _ in range(2):
        with pytest.raises(NoSpaceError):
            work.finish_these(task)
    work.finish()
    old = work.submit("an old check", fail, 1, awaited=True)
    work.drop([old])
    work.finish()
    assert work._tasks == []
    work.close()


def test_the_end_waits_but_not_for_ever(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(64 << 20))
    work = Background()
    options = Options(bandwidth_limit_mib=1)
    copy = transfer.Copy(tmp_path / "big", tmp_path / "copy")
    finished: list[bool] = []

    def slow() -> None:
        transfer.run([copy], options, what="slow", sync=False, gate=work.gate)
        finished.append(True)

    work.submit("a slow copy", slow, 0.3)
    start = time.monotonic()
    work.close()
    assert 0.3 <= time.monotonic() - start < 5
    assert not finished
    with pytest.raises(_native.Cancelled):
        transfer.run([copy], options, what="late", sync=False, gate=work.gate)


def test_background_transfers_pause_while_training_uses_the_disk(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(32 << 20))
    work = Background()
    ended: list[float] = []

    def copy() -> None:
        transfer.run(
            [transfer.Copy(tmp_path / "big")], Options(block_mib=1), what="x", sync=False, gate=work.gate
        )
        ended.append(time.monotonic())

    work.gate.busy(True)
    start = time.monotonic()
    work.submit("copy", copy, 1)
    threading.Timer(0.6, lambda: work.gate.busy(False)).start()
    work._tasks[0].wait()
    assert ended[0] - start >= 0.6
    work.gate.busy(True)
    start = time.monotonic()
    work.submit("copy", copy, 1)
    work.finish()  # the training waits: no pause
    assert ended[1] - start < 0.5
    work.close()


def checkpoint(tmp_path: Path) -> tuple[Path, RankRecord]:
    folder = tmp_path / "t"
    (folder / layout.RECORDS).mkdir(parents=True)
    (folder / "a.swp").write_bytes(b"x" * 5000)
    (folder / "b.pt").write_bytes(b"y" * 10)
    (folder / layout.manifest()).write_text("{}")
    found = seam.current().identity(folder / "a.swp")
    (known,) = transfer.run([transfer.Copy(folder / "b.pt")], Options(), what="x", sync=False)
    record = RankRecord(
        checkpoint_id="c",
        tag="t",
        rank=0,
        world_size=1,
        optimizer="o",
        master_dtype="float32",
        optim_file="b.pt",
        model_file="b.pt",
        sub_groups=(),
        files={
            "a.swp": FileRecord(size=5000, inode=found.inode, mtime_ns=found.mtime_ns),
            "b.pt": FileRecord(size=10, digest=known.digest),
        },
    )
    return folder, record


def add(folder: seal.HeldFolder, record: RankRecord) -> None:
    seal.add(folder, record, Options(), Background().gate, {})


def test_a_seal_follows_a_renamed_folder(tmp_path: Path) -> None:
    folder, record = checkpoint(tmp_path)
    held = seal.HeldFolder(folder)
    folder.rename(tmp_path / "checkpoint-5")
    add(held, record)
    found = records.read(tmp_path / "checkpoint-5", layout.seal(0), Seal)
    assert found.record_digest == manifest.digest_of(record)
    assert {n: f.size for n, f in found.files.items()} == {"a.swp": 5000, "b.pt": 10}
    assert not list((tmp_path / "checkpoint-5" / layout.RECORDS).glob(".tmp*"))


def test_a_removed_checkpoint_is_no_failure(tmp_path: Path) -> None:
    folder, record = checkpoint(tmp_path)
    held = seal.HeldFolder(folder)
    (folder / "a.swp").unlink()
    threading.Timer(0.3, (folder / layout.manifest()).unlink).start()  # as rmtree goes on
    add(held, record)
    assert not (folder / layout.seal(0)).exists()


@pytest.mark.parametrize("change", ["written", "cut", "same size, other time"])
def test_a_seal_fails_loudly_when_a_frozen_file_was_written_to(
    tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seal, "_DELETION_SECONDS", 0.2)
    folder, record = checkpoint(tmp_path)
    held = seal.HeldFolder(folder)
    with (folder / "a.swp").open("r+b") as file:
        if change == "cut":
            file.truncate(4000)
        else:
            file.write(b"x" if change.startswith("same") else b"z")
    with pytest.raises(CorruptError):
        add(held, record)
    assert not (folder / layout.seal(0)).exists()


def test_work_that_never_began_gives_back_what_it_uses() -> None:
    """Else no later engine of the process would ever remove that checkpoint."""
    work, hold = Background(), threading.Event()
    seen: list[str] = []
    work.submit("first", lambda: hold.wait(5) and None, 0.0)
    second = work.submit("second", lambda: seen.append("ran"), 0.0, at_end=lambda: seen.append("end"))
    threading.Timer(0.3, hold.set).start()
    work.close()
    assert second.wait(5) and seen == ["end"]


def test_a_limit_holds_for_all_that_share_it() -> None:
    """Two threads together, and a closed gate ends the wait."""
    limit, gate = Limit(16.0), Gate()
    start = time.monotonic()
    threads = [threading.Thread(target=limit.spend, args=(2 << 20, gate)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - start >= 0.49
    gate.close()
    with pytest.raises(Cancelled):
        Limit(0.001).spend(1 << 20, gate)


def test_a_folder_goes_while_somebody_adds_to_it(tmp_path: Path) -> None:
    """The hashes of a checkpoint may come in while it is removed: a temporary name appears and goes."""

    folder = tmp_path / "ck"
    removed = shutil.rmtree
    turns = iter([FileNotFoundError(errno.ENOENT, "gone"), OSError(errno.ENOTEMPTY, "not empty")])

    def rmtree(path: Path) -> None:
        for error in turns:
            raise error
        removed(path)

    folder.mkdir()
    (folder / "file").write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", rmtree)
        seam.current().remove_tree(folder)
    assert not folder.exists()
