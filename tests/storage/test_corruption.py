"""A thousand random damages to a sealed checkpoint: each one is refused, by a check of every byte, naming the file.

Drawn from one seed.  Some damages turn out to be none (two equal files swapped) and are drawn again.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from nvme_resume import layout, manifest
from nvme_resume.errors import CorruptError, IncompatibleError, NoCheckpointError
from nvme_resume.manifest import Manifest
from nvme_resume.storage import audit, catalog
from tests.attacks.forge import Forge

DAMAGES = 1000


class Undo:
    """Puts back what a damage took away: the files it touched are few, the checkpoint need not be made anew."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.before: dict[Path, bytes] = {}

    def touch(self, path: Path) -> None:
        self.before[path] = path.read_bytes()

    def __call__(self) -> None:
        for path, data in self.before.items():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif os.path.lexists(path):
                path.unlink()
            path.write_bytes(data)


Damage = Callable[[random.Random, list[Path], Undo, Path], "set[str]"]


def flip_bit(dice: random.Random, files: list[Path], undo: Undo, other: Path) -> set[str]:
    path = dice.choice(files)
    undo.touch(path)
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)
    return {path.name}


def truncate(dice: random.Random, files: list[Path], undo: Undo, other: Path) -> set[str]:
    path = dice.choice(files)
    undo.touch(path)
    os.truncate(path, dice.randrange(path.stat().st_size))
    return {path.name}


def extend(dice: random.Random, files: list[Path], undo: Undo, other: Path) -> set[str]:
    path = dice.choice(files)
    undo.touch(path)
    with path.open("ab") as file:
        file.write(dice.randbytes(dice.randrange(1, 5000)))
    return {path.name}


def swap_two(dice: random.Random, files: list[Path], undo: Undo, other: Path) -> set[str]:
    one, two = dice.sample(files, 2)
    undo.touch(one)
    undo.touch(two)
    data = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(data)
    return {one.name, two.name}


def remove(dice: random.Random, files: list[Path], undo: Undo, other: Path) -> set[str]:
    path = dice.choice(files)
    undo.touch(path)
    path.unlink()
    return {path.name}


def symlink(dice: random.Random, files: list[Path], undo: Undo, other: Path) -> set[str]:
    """The right bytes by way of a link are refused as well: it may lead anywhere tomorrow."""
    path = dice.choice(files)
    undo.touch(path)
    elsewhere = undo.folder.parent / "elsewhere"
    elsewhere.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(elsewhere)
    return {path.name}


def become_folder(dice: random.Random, files: list[Path], undo: Undo, other: Path) -> set[str]:
    path = dice.choice(files)
    undo.touch(path)
    path.unlink()
    path.mkdir()
    return {path.name}


def become_fifo(dice: random.Random, files: list[Path], undo: Undo, other: Path) -> set[str]:
    path = dice.choice(files)
    undo.touch(path)
    path.unlink()
    os.mkfifo(path)
    return {path.name}


def _records(files: list[Path]) -> list[Path]:
    return [p for p in files if p.suffix == ".json"]


def of_another_rank(dice: random.Random, files: list[Path], undo: Undo, other: Path) -> set[str]:
    path = dice.choice([p for p in files if "rank00" in str(p)])
    undo.touch(path)
    twin = undo.folder / str(path.relative_to(undo.folder)).replace("rank00", "rank01")
    path.write_bytes(twin.read_bytes())
    return {path.name}


def of_another_checkpoint(dice: random.Random, files: list[Path], undo: Undo, other: Path) -> set[str]:
    """``other`` has the same tag, ranks, names and sizes: a later save of the same run."""
    path = dice.choice(files)
    undo.touch(path)
    path.write_bytes((other / path.relative_to(undo.folder)).read_bytes())
    # The manifest of another one is sound in itself: then the first record is what does not fit.
    return {path.name, *(["rank00.json"] if path.name == layout.MANIFEST else [])}


def all_records_but_one(dice: random.Random, files: list[Path], undo: Undo, other: Path) -> set[str]:
    """All records of another checkpoint but one that is ours; our data, of which rank 0's is looked at first."""
    kept = dice.choice(_records(files))
    for path in _records(files):
        if path != kept:
            undo.touch(path)
            path.write_bytes((other / path.relative_to(undo.folder)).read_bytes())
    return {kept.name, "rank00.json", *(p.name for p in files if p.suffix != ".json")}


def only_data(dice: random.Random, files: list[Path], undo: Undo, other: Path) -> set[str]:
    """All records of another checkpoint beside our data."""
    for path in _records(files):
        undo.touch(path)
        path.write_bytes((other / path.relative_to(undo.folder)).read_bytes())
    return {p.name for p in files if p.suffix != ".json"}


KINDS: list[Damage] = [
    flip_bit, truncate, extend, swap_two, remove, symlink, become_folder, become_fifo, of_another_rank,
    of_another_checkpoint, all_records_but_one, only_data,
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Forge(seed=1).write(tmp_path)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return Forge(seed=2).write(tmp_path / "other")


def state(folder: Path) -> dict[Path, tuple[int, int, int]]:
    return {p: ((s := p.lstat()).st_mode, s.st_size, s.st_mtime_ns) for p in sorted(folder.rglob("*"))}


def test_a_thousand_damages_are_refused_by_name(folder: Path, other: Path) -> None:
    dice = random.Random(20260101)
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    sound = {p: p.read_bytes() for p in files}
    tried: Counter[str] = Counter()
    while tried.total() < DAMAGES:
        # Half of them single bits: there are many more places for those.
        damage = flip_bit if dice.random() < 0.5 else dice.choice(KINDS)
        undo = Undo(folder)
        names = damage(dice, files, undo, other)
        if all(p.is_file() and not p.is_symlink() and p.read_bytes() == data for p, data in sound.items()):
            continue
        tried[damage.__name__] += 1
        before = state(folder)
        try:
            audit.check(folder, "full")
        except (CorruptError, IncompatibleError, NoCheckpointError) as error:
            assert any(name in str(error) for name in names), (damage.__name__, names, str(error))
        else:
            pytest.fail(f"{damage.__name__} of {names} was not noticed")
        assert state(folder) == before
        undo()
    assert set(tried) == {d.__name__ for d in KINDS}
    assert audit.check(folder, "full").unsealed == 0  # all put back: the damages were what was refused


def test_every_single_bit_of_a_manifest_counts(folder: Path) -> None:
    """Exhaustive.  No flipped bit turns white space into other white space, and all else is digested."""
    data = bytearray((folder / layout.manifest()).read_bytes())
    for position in range(len(data) * 8):
        data[position // 8] ^= 1 << position % 8
        with pytest.raises((CorruptError, IncompatibleError)):
            manifest.decode(Manifest, bytes(data), "manifest.json")
        data[position // 8] ^= 1 << position % 8
    assert manifest.decode(Manifest, bytes(data), "manifest.json").tag == "t"


def test_other_white_space_is_the_same_record(folder: Path) -> None:
    """The digest is of the values, not of the text: a manifest that was reformatted says the same."""
    path = folder / layout.manifest()
    path.write_text(path.read_text().replace("\n", "\r\n\t "))
    assert audit.check(folder, "full").head.tag == "t"


def test_what_sizes_and_records_show_is_skipped_by_a_load_without_a_tag(folder: Path, other: Path) -> None:
    """The check that chooses a checkpoint reads no data; of all damages but those of data it says the same."""
    dice = random.Random(7)
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    for damage in KINDS * 10:
        undo = Undo(folder)
        damage(dice, files, undo, other)
        entry = catalog.look(folder.parent, folder.name)
        same = all(
            p.is_file() and not p.is_symlink() and p.stat().st_size == len(d) for p, d in undo.before.items()
        )
        if not same or any(p.suffix == ".json" and p.read_bytes() != d for p, d in undo.before.items()):
            assert entry.problem is not None or damage is only_data, damage.__name__
        undo()
    assert catalog.look(folder.parent, folder.name).problem is None
