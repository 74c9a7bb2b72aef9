"""A power failure at any instant of a save, of its mending, of a removal: nothing that was committed is lost.

Each test records what is really done (``recording``), builds the states a crash may leave (``model``) and looks at each
(``promise``).  The tests at the end break the protocol on purpose: the model must see it.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from nvme_resume import layout
from nvme_resume.storage import catalog, commit, prune, records, transfer
from nvme_resume.storage import disk as seam
from nvme_resume.storage.seal import HeldFolder
from tests import harness
from tests.crash import model, promise
from tests.crash.model import Log, Mark
from tests.crash.promise import SAVES, save, violations
from tests.crash.recording import RecordingDisk, recorded

SAMPLES = 12

Work = Callable[[Path], None]


class NoExchange(RecordingDisk):
    """As NFS."""

    def exchange(self, one: Path, other: Path) -> bool:
        return False


class Killed(BaseException):
    """The process is gone."""


def record(root: Path, work: Work, kind: type[RecordingDisk] = RecordingDisk) -> Log:
    """The log of ``work`` on the save folder below ``root``."""
    root.mkdir(parents=True, exist_ok=True)
    disk = kind(root)
    try:
        with recorded(disk):
            work(root / SAVES)
    finally:
        disk.close()
    return disk.log


def first(save_dir: Path) -> None:
    seam.current().make_folder(save_dir)
    commit.anchor(save_dir)
    save(save_dir, "a", "a1", 1, sealed=True)


def another(save_dir: Path) -> None:
    first(save_dir)
    save(save_dir, "b", "b2", 2, sealed=False)


def same_tag_twice(save_dir: Path) -> None:
    another(save_dir)
    save(save_dir, "a", "a3", 3, sealed=False)
    save(save_dir, "a", "a4", 4, sealed=True)


def sealed_later(save_dir: Path) -> None:
    another(save_dir)
    seal_b(save_dir)


def seal_b(save_dir: Path) -> None:
    """As the background thread does, through the open folder."""
    held = HeldFolder(save_dir / "b")
    record, _, _ = records.read_rank(held.path, records.read_manifest(save_dir / "b"), 0)
    seals = {name: transfer.hash_of(memoryview((held.path / name).read_bytes())) for name in record.files}
    records.write_late(held.path, layout.seal(0), promise.seal_of(record, seals))
    held.close()


def rotated(save_dir: Path) -> None:
    another(save_dir)
    save(save_dir, "c", "c3", 3, sealed=True)
    prune.prune(save_dir, 2)
    save(save_dir, "d", "d4", 4, sealed=True)
    prune.prune(save_dir, 1)


WORKS: dict[str, Work] = {
    "first": first,
    "another": another,
    "same tag twice": same_tag_twice,
    "sealed later": sealed_later,
    "rotated": rotated,
}


@pytest.mark.parametrize("name", WORKS)
def test_power_may_fail_at_any_step(tmp_path: Path, name: str) -> None:
    log = record(tmp_path / "root", WORKS[name])
    found, states = violations(log, SAMPLES)
    assert found == []
    assert states > 50


def test_so_it_may_where_folders_cannot_be_exchanged(tmp_path: Path) -> None:
    log = record(tmp_path / "root", same_tag_twice, NoExchange)
    assert any(
        isinstance(s, model.Entries) and any(n.startswith(layout.RETIRED_PREFIX) for _, n, _ in s.changes)
        for s in log.steps
    )
    found, _ = violations(log, SAMPLES, two_renames=True)
    assert found == []


def short(save_dir: Path) -> None:
    first(save_dir)
    save(save_dir, "a", "a2", 2, sealed=False)


def killed_at(call: int, kind: type[RecordingDisk]) -> type[RecordingDisk]:
    """A disk under which the process dies before the ``call``-th change of names, once."""

    class Kills(kind):  # type: ignore[misc,valid-type]
        calls = 0
        armed = True

        def _count(self) -> None:
            self.calls += self.armed
            if self.armed and self.calls == call:
                raise Killed

        def rename(self, source: Path, target: Path) -> None:
            self._count()
            super().rename(source, target)

        def exchange(self, one: Path, other: Path) -> bool:
            self._count()
            return bool(super().exchange(one, other))

        def sync_folder(self, path: Path) -> None:
            if path.name == SAVES:
                self._count()
            super().sync_folder(path)

    return Kills


def killed_and_mended(root: Path, call: int, kind: type[RecordingDisk]) -> tuple[Log, int | None]:
    """A process dies at a call, another cleans up and saves; the log, and where in it the first one died."""

    def work(save_dir: Path) -> None:
        disk: Any = seam.current()
        try:
            short(save_dir)
        except Killed:
            disk.mark(Mark("killed", ""))
        disk.armed = False
        commit.mend(save_dir)
        for leftover in catalog.leftovers(save_dir):
            commit.recover(leftover)
        save(save_dir, "b", "b5", 5, sealed=True)

    log = record(root, work, killed_at(call, kind))
    died = [i for i, s in enumerate(log.steps) if isinstance(s, Mark) and s.what == "killed"]
    return log, died[0] if died else None


@pytest.mark.parametrize("kind", [RecordingDisk, NoExchange])
def test_a_process_dies_and_power_fails_while_the_next_one_mends(
    tmp_path: Path, kind: type[RecordingDisk]
) -> None:
    """What a killed process left unsynced is there for the next one to see, and gone with the power."""
    call = 4  # the first checkpoint is whole by then
    while True:
        call += 1
        place = tmp_path / str(call)
        log, died = killed_and_mended(place, call, kind)
        if died is None:
            break
        found, _ = violations(log, 2, two_renames=kind is NoExchange, first=died)
        assert found == [], f"killed at {call}"
    assert call > 8


@pytest.mark.parametrize("kind", [RecordingDisk, NoExchange])
def test_power_fails_again_while_the_first_crash_is_mended(tmp_path: Path, kind: type[RecordingDisk]) -> None:
    """After a reboot all that is left is durable; then mend and recover are hit in turn."""
    log = record(tmp_path / "root", short, kind)
    (tmp_path / "pool").mkdir()
    mended: set[frozenset[tuple[str, str | None]]] = set()
    for crash in model.crashes(log, SAVES, 2):
        tree = {path: key for path, key in crash.tree.items() if path.startswith(SAVES)}
        leftovers = [path for path in tree if layout.is_leftover(path.rpartition("/")[2])]
        at = promise.promise_at(log, crash.prefix)
        if not leftovers or not at.kept or frozenset(tree.items()) in mended:
            continue
        mended.add(frozenset(tree.items()))
        place = tmp_path / str(len(mended))
        (place / "root").mkdir(parents=True)
        model.write(tree, log.store, SAVES, place / "root" / SAVES, tmp_path / "pool")

        def work(save_dir: Path) -> None:
            commit.mend(save_dir)
            for leftover in catalog.leftovers(save_dir):
                commit.recover(leftover)

        again = record(place / "root", work)
        # What had been promised before the first crash is still asked for.
        marks = [s for s in log.steps[: crash.prefix] if isinstance(s, Mark)]
        again.steps[:0] = marks
        found, _ = violations(again, 2, two_renames=kind is NoExchange, first=len(marks))
        assert found == [], (crash.prefix, crash.how)
    assert len(mended) > 10


METHODS: dict[str, dict[str, Any]] = {
    "link": {"method": "link", "keep_last": 2},
    "direct": {"method": "direct"},
    "async": {"method": "direct", "async": True, "keep_last": 2},
}


@pytest.mark.parametrize("name", METHODS)
def test_power_may_fail_at_any_step_of_real_saves(tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    case = harness.DEFAULTS | {
        "root": str(root),
        "nvme_path": str(root / "nvme"),
        "layers": 1,
        "nvme_checkpoint": METHODS[name],
        "saves": ["a", "b", "a", "c"],
    }
    path, dump = tmp_path / "case.json", tmp_path / "log"
    path.write_text(json.dumps(case))
    codes, text = harness.launch(tmp_path, name, 1, "tests.crash.saving", str(path), str(dump))
    assert codes == [0], text
    log: Log = pickle.loads(dump.read_bytes())
    assert sum(isinstance(s, Mark) and s.what == "committed" for s in log.steps) == 4
    found, states = violations(log, 2)
    assert found == []
    assert states > 100


# ---- the model sees what is wrong ----


def unsynced(files: str = "", folders: str = "") -> type[RecordingDisk]:
    """A disk that forgets to fsync what matches a pattern."""

    class Forgets(RecordingDisk):
        def write(self, path: Path, data: bytes, *, sync: bool = True) -> None:
            super().write(path, data, sync=sync and not fnmatch(path.name, files))

        def sync_file(self, path: Path) -> None:
            if not fnmatch(path.name, files):
                super().sync_file(path)

        def sync_folder(self, path: Path) -> None:
            if not fnmatch(path.name, folders):
                super().sync_folder(path)

    return Forgets


class RemovesFirst(RecordingDisk):
    """Puts a checkpoint in the place of another in two steps."""

    def exchange(self, one: Path, other: Path) -> bool:
        self.remove_tree(other)
        self.rename(one, other)
        return True


BROKEN: dict[str, tuple[type[RecordingDisk], Work, str]] = {
    "name of the save folder": (unsynced(folders="root"), first, "latest is gone"),
    "names in the save folder": (unsynced(folders=SAVES), another, "latest names"),
    "manifest": (unsynced("manifest.json"), another, "manifest.json"),
    "latest": (unsynced(f"{layout.STAGING_PREFIX}{layout.LATEST}*"), another, "latest holds ''"),
    "names of the records": (unsynced(folders=layout.RECORDS), another, "manifest"),
    "rank record": (unsynced("rank00.json"), another, "rank00.json"),
    "swap files": (unsynced("*.swp"), another, "wrong size"),
    "names of the swap files": (unsynced(folders="rank00"), another, ".swp"),
    "late seal": (unsynced(f"{layout.STAGING_PREFIX}rank00.seal.json*"), sealed_later, "seal.json"),
    "removed first": (RemovesFirst, same_tag_twice, "a: CorruptError"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_protocol_is_seen(tmp_path: Path, name: str) -> None:
    kind, work, expected = BROKEN[name]
    found, _ = violations(record(tmp_path / "root", work, kind), SAMPLES)
    assert any(expected in text for text in found), found[:3]


def test_a_checkpoint_removed_under_its_own_name_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prune, "remove", lambda save_dir, tag: seam.current().remove_tree(save_dir / tag))
    found, _ = violations(record(tmp_path / "root", rotated), SAMPLES)
    assert any("is missing" in text or "cannot be read" in text for text in found), found[:3]


def test_leftovers_removed_before_the_names_are_durable_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "_remove", lambda leftover: seam.current().remove_tree(leftover))
    seen = []
    for call in range(5, 9):
        place = tmp_path / str(call)
        log, died = killed_and_mended(place, call, RecordingDisk)
        seen += violations(log, 2, first=died or 0)[0]
    assert any("a: " in text for text in seen)
