"""Frozen swap files: what a checkpoint holds never changes, whatever the training reads and writes afterwards."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvme_resume import layout
from nvme_resume.config import Options
from nvme_resume.errors import CorruptError, NoSpaceError
from nvme_resume.storage import disk as seam
from nvme_resume.storage.snapshot import SwapFiles

SIZE = 8192


class Training:
    """Reads and writes swap files as DeepSpeed does: by path, whole, without truncating."""

    def __init__(self, root: Path, names: int = 1) -> None:
        self.folder = root / "nvme" / "zero_stage_3" / "optimizer" / "rank0"
        self.folder.mkdir(parents=True)
        self.files = SwapFiles(Options())
        self.public = [self.folder / f"{i}_{i}.tensor.swp" for i in range(names)]
        for path in self.public:
            path.write_bytes(bytes(SIZE))

    def write(self, index: int, value: int, size: int = SIZE, offset: int = 0) -> None:
        path = str(self.public[index])
        self.files.begin_write(path, offset, size)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.pwrite(descriptor, bytes([value]) * size, offset)
        os.close(descriptor)

    def read(self, index: int) -> bytes:
        return Path(self.files.begin_read(str(self.public[index]))).read_bytes()[:SIZE]

    def link(self, index: int, target: Path) -> seam.Identity:
        return self.files.link_into(self.public[index], SIZE, target, rewritten=True)


def inode(path: Path) -> int:
    return path.stat().st_ino


def test_a_frozen_inode_has_no_public_name(tmp_path: Path) -> None:
    training, saved = Training(tmp_path), tmp_path / "saved"
    training.write(0, 1)
    before = inode(training.public[0])
    training.link(0, saved)
    assert inode(saved) == before
    assert training.read(0) == b"\1" * SIZE
    # A stranger who opens the swap file by its name, as the next start of plain DeepSpeed does.
    training.public[0].write_bytes(b"\xff" * SIZE)
    assert saved.read_bytes() == training.read(0) == b"\1" * SIZE
    training.write(0, 2)
    assert training.read(0) == b"\2" * SIZE
    assert saved.read_bytes() == b"\1" * SIZE
    assert inode(training.public[0]) != before


def test_two_saves_of_one_state_share_the_inode(tmp_path: Path) -> None:
    training = Training(tmp_path)
    one, two = (training.link(0, tmp_path / name) for name in ("one", "two"))
    assert one == two


def test_a_removed_checkpoint_does_not_harm_the_training(tmp_path: Path) -> None:
    training, saved = Training(tmp_path), tmp_path / "saved"
    training.write(0, 1)
    training.link(0, saved)
    saved.unlink()
    assert training.read(0) == b"\1" * SIZE


@pytest.mark.parametrize(("size", "offset"), [(4096, 0), (4096, 4096), (1, SIZE - 1)])
def test_a_write_of_a_part_keeps_the_rest(tmp_path: Path, size: int, offset: int) -> None:
    """DeepSpeed never does this; should it begin to, nothing may be lost in silence."""
    training, saved = Training(tmp_path), tmp_path / "saved"
    training.write(0, 1)
    training.link(0, saved)
    training.write(0, 2, size, offset)
    expected = bytearray(b"\1" * SIZE)
    expected[offset : offset + size] = b"\2" * size
    assert training.read(0) == expected
    assert saved.read_bytes() == b"\1" * SIZE


def test_stale_bytes_behind_the_tensor_and_private_rights_do_not_get_into_the_checkpoint(
    tmp_path: Path,
) -> None:
    training, saved = Training(tmp_path), tmp_path / "saved"
    training.public[0].write_bytes(bytes(2 * SIZE))
    training.public[0].chmod(0o600)
    training.link(0, saved)
    umask = os.umask(0)
    os.umask(umask)
    assert (saved.stat().st_size, saved.stat().st_mode & 0o777) == (SIZE, 0o666 & ~umask)


def test_a_short_swap_file_is_refused(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.public[0].write_bytes(b"short")
    with pytest.raises(OSError, match="not 8192"):
        training.link(0, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_link_that_cannot_be_changes_nothing(tmp_path: Path) -> None:
    training = Training(tmp_path)
    (tmp_path / "saved").write_bytes(b"")
    with pytest.raises(FileExistsError):
        training.link(0, tmp_path / "saved")
    assert training.files.source(training.public[0]) == training.public[0]


def test_the_next_state_has_its_room_before_it_is_written(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.link(0, tmp_path / "saved")
    training.files.begin_write(str(training.public[0]), 0, SIZE)
    assert training.public[0].stat().st_blocks * 512 >= SIZE


def test_no_room_is_an_error_and_not_a_silent_loss(tmp_path: Path) -> None:
    class Full(seam.Disk):
        def allocate(self, path: Path, size: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    training = Training(tmp_path)
    training.write(0, 1)
    with seam.replaced(Full()):
        training.link(0, tmp_path / "saved")
        for _ in range(2):
            with pytest.raises(NoSpaceError, match="no room for the next state"):
                training.write(0, 2)
    assert training.read(0) == b"\1" * SIZE


def test_blocks_of_a_finished_copy_are_used_again_but_never_a_checkpoints(tmp_path: Path) -> None:
    training = Training(tmp_path)
    path = training.files.hold(training.public[0], SIZE, rewritten=True)
    held = inode(path)
    training.write(0, 2)
    assert path.exists()
    training.files.release(path)
    training.link(0, tmp_path / "saved")
    assert inode(training.public[0]) == held
    # Now one that a checkpoint shares.
    training.write(0, 3)
    path = training.files.hold(training.public[0], SIZE, rewritten=True)
    training.link(0, tmp_path / "second")
    training.files.release(path)
    training.write(0, 4)
    training.link(0, tmp_path / "third")
    training.write(0, 5)
    assert (tmp_path / "second").read_bytes() == b"\3" * SIZE
    assert (tmp_path / "third").read_bytes() == b"\4" * SIZE


def test_an_adopted_file_is_checked_before_it_is_read(tmp_path: Path) -> None:
    training = Training(tmp_path)
    private = training.files.folder(training.folder).name(training.public[0])
    private.write_bytes(b"\7" * SIZE)
    mark = training.files.mark()
    training.files.adopt(training.public[0], private, SIZE, shared=True)
    assert training.read(0) == b"\7" * SIZE
    training.files.go_back(mark)
    assert training.read(0) == bytes(SIZE)
    training.files.adopt(training.public[0], private, SIZE, shared=True)
    training.files.settle(mark)

    def damaged() -> None:
        raise CorruptError("damaged")

    training.files.check_first(training.public[0], damaged)
    for _ in range(2):
        with pytest.raises(CorruptError):
            training.read(0)
    with pytest.raises(CorruptError):
        training.write(0, 1)
    # Nor does it get into a checkpoint, whose seal would call it good.
    with pytest.raises(CorruptError):
        training.link(0, tmp_path / "saved")
    with pytest.raises(CorruptError):
        training.files.hold(training.public[0], SIZE, rewritten=True)
    assert not (tmp_path / "saved").exists()


def test_a_copied_file_takes_the_public_name(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.link(0, tmp_path / "saved")  # what was frozen before goes
    private = training.files.folder(training.folder).name(training.public[0])
    private.write_bytes(b"\7" * SIZE)
    mark = training.files.mark()
    training.files.adopt(training.public[0], private, SIZE, shared=False)
    training.files.settle(mark)
    assert training.files.source(training.public[0]) == training.public[0]
    assert training.read(0) == b"\7" * SIZE
    assert not private.exists()


def test_a_file_that_is_never_written_anew_gets_no_room(tmp_path: Path) -> None:
    training = Training(tmp_path)
    private = training.files.folder(training.folder).name(training.public[0])
    private.write_bytes(b"\7" * SIZE)
    training.public[0].unlink()
    mark = training.files.mark()
    training.files.adopt(training.public[0], private, SIZE, shared=True, rewritten=False)
    training.files.settle(mark)
    training.files.close()  # what was ordered is there by then
    assert not training.public[0].exists()


def test_room_is_counted_with_each_spare_file_once(tmp_path: Path) -> None:
    training = Training(tmp_path, 3)
    files = [(path, SIZE) for path in training.public]
    assert training.files.room_for(files) == 3 * SIZE
    path = training.files.hold(training.public[0], SIZE, rewritten=True)
    assert training.files.room_for(files) == 2 * SIZE
    training.write(0, 1)
    training.files.release(path)
    assert training.files.room_for(files) == 2 * SIZE


HOLD = (
    "import sys, time; from pathlib import Path; from nvme_resume.storage.private import PrivateFolder\n"
    "f = PrivateFolder(Path(sys.argv[1])); (f.path / 'x').write_text('x'); print(f.path, flush=True); time.sleep(60)"
)


def test_private_files_of_dead_owners_go_those_of_living_ones_stay(tmp_path: Path) -> None:
    training = Training(tmp_path)
    root = layout.private_root(training.folder)
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(root)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert owner.stdout is not None
    path = Path(owner.stdout.readline().strip())
    training.files.folder(training.folder)
    assert (path / "x").exists()
    owner.kill()
    owner.wait()
    owner.stdout.close()
    SwapFiles(Options()).folder(training.folder)
    assert not path.exists()
    training.files.close()
    assert len(list(root.iterdir())) == 2  # the third one's folder and lock


def test_locks_go_whose_owner_died_before_it_made_its_folder(tmp_path: Path) -> None:
    training = Training(tmp_path)
    root = layout.private_root(training.folder)
    root.mkdir(parents=True)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    here = socket.gethostname()
    lone = root / f"{here}-{dead.pid}-0123abcd.lock"
    # Not locked yet by a living process; on a host that cannot be asked; no private folder's.
    stay = [
        root / f"{here}-{os.getpid()}-0123abcd.lock",
        root / "not-me-1-0123abcd.lock",
        root / "rank0.lock",
    ]
    for path in (lone, *stay):
        path.touch()
    training.files.folder(training.folder)
    assert not lone.exists()
    assert all(path.exists() for path in stay)


OPERATIONS = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 1), st.integers(1, 250)),
    st.tuples(st.just("part"), st.integers(0, 1), st.integers(1, 250)),
    st.tuples(st.just("save"), st.integers(0, 1), st.just(0)),
    st.tuples(st.just("hold"), st.integers(0, 1), st.just(0)),
    st.tuples(st.just("release"), st.just(0), st.just(0)),
    st.tuples(st.just("remove"), st.just(0), st.just(0)),
    st.tuples(st.just("load"), st.integers(0, 1), st.booleans()),
    st.tuples(st.just("thaw"), st.integers(0, 1), st.just(0)),
)


@given(st.lists(OPERATIONS, max_size=25))
@settings(max_examples=120, deadline=None)
def test_any_sequence_of_saves_loads_and_writes(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]
) -> None:
    """A model of plain bytes: what was saved stays, what is read is what was written or loaded last."""
    tmp = tmp_path_factory.mktemp("model")
    training = Training(tmp, 2)
    present = [bytearray(SIZE), bytearray(SIZE)]
    saved: dict[Path, bytes] = {}
    held: list[tuple[Path, bytes]] = []
    for number, (what, index, value) in enumerate(steps):
        public = training.public[index]
        if what == "write":
            training.write(index, value)
            present[index][:] = bytes([value]) * SIZE
        elif what == "part":
            training.write(index, value, 512, 1024)
            present[index][1024:1536] = bytes([value]) * 512
        elif what == "save":
            target = tmp / f"saved{number}"
            training.link(index, target)
            saved[target] = bytes(present[index])
        elif what == "hold":
            held.append((training.files.hold(public, SIZE, rewritten=True), bytes(present[index])))
        elif what == "release" and held:
            path, content = held.pop(0)
            assert path.read_bytes()[:SIZE] == content
            training.files.release(path)
        elif what == "remove" and saved:
            path = next(iter(saved))
            del saved[path]
            path.unlink()
        elif what == "load" and saved:
            source = list(saved)[-1]
            private = training.files.folder(training.folder).name(public)
            mark = training.files.mark()
            if value:
                private.hardlink_to(source)
            else:
                private.write_bytes(saved[source])
            training.files.adopt(public, private, SIZE, shared=bool(value))
            training.files.settle(mark)
            present[index][:] = saved[source]
        elif what == "thaw":
            training.files.thaw(public)
            assert public.read_bytes()[:SIZE] == present[index]
        for i in range(2):
            assert training.read(i) == present[i]
        for path, content in saved.items():
            assert path.read_bytes() == content
            assert inode(path) not in {inode(p) for p in training.public if p.exists()}
    training.files.close()
