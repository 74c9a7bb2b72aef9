"""Power cuts on real file systems: ext4 and xfs are shut down in the middle of a save, with nothing flushed.

``model`` allows more than they do; here it is their own journals, and the page cache of a running kernel, that decide
what is left.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nvme_resume import layout
from tests import harness

SIZE = 1 << 30  # of each sparse image
# The last changes of a save: manifest, latest, their fsyncs, rename, fsync, rename of latest, fsync.
FAST: list[int | None] = [None, -1, -3, -6]
METHODS: dict[str, dict[str, Any]] = {
    # Hashed before the commit: a hash that is written after it would be counted as a change of the save.
    "link": {"method": "link", "seal": "before_commit"},
    "direct": {"method": "direct"},
    "async": {"method": "direct", "async": True},
}


class Image:
    """One file system in a file."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.place = folder / "mount"
        self.place.mkdir(parents=True)
        self._file = folder / "image"
        with self._file.open("wb") as file:
            file.truncate(SIZE)
        subprocess.run([f"mkfs.{kind}", "-q", str(self._file)], check=True)

    def mount(self) -> None:
        done = subprocess.run(
            ["mount", "-o", "loop", str(self._file), str(self.place)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"cannot mount: {done.stderr.strip()}")

    def unmount(self) -> None:
        subprocess.run(["umount", str(self.place)], check=True)


@pytest.fixture(params=["ext4", "xfs"])
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    if not shutil.which(f"mkfs.{found}"):
        pytest.skip(f"mkfs.{found} is not installed")
    return found


@pytest.fixture
def images(tmp_path: Path) -> Iterator[list[Image]]:
    made: list[Image] = []
    yield made
    for image in made:
        if os.path.ismount(image.place):
            image.unmount()


def cut(
    tmp: Path, images: list[Image], kind: str, moments: Sequence[int | None], *, tag: str, method: str
) -> list[str]:
    """Save, cut at each moment, mount again, load in another process.  Which checkpoint each load brought back."""
    images += [Image(kind, tmp / f"{kind}{number}") for number in range(len(moments))]
    for image in images:
        image.mount()
    case = harness.DEFAULTS | {
        "layers": 1,
        "nvme_checkpoint": METHODS[method],
        "second_tag": tag,
        "cuts": [{"place": str(i.place), "moment": m} for i, m in zip(images, moments, strict=True)],
    }
    path = tmp / "case.json"
    path.write_text(json.dumps(case))
    reports = []
    for act in ("save", "load"):
        codes, log = harness.launch(tmp, act, 1, "tests.crash.cutting", act, str(path), str(tmp / act))
        assert codes == [0], log
        reports.append(json.loads((tmp / act).read_text()))
        if act == "save":
            for image in images:
                image.unmount()
                image.mount()
    came_back = []
    for moment, saved, loaded in zip(moments, *reports, strict=True):
        matches = [name for name in "ab" if not harness.differences(saved[name], loaded["loaded"])]
        assert len(matches) == 1, (moment, harness.differences(saved["a"], loaded["loaded"])[:3])
        assert not saved["committed"] or matches == ["b"], f"lost at {moment}"
        # What is replaced goes after the commit, with the last change, and a failure there is none of the save.
        harmless = moment is None or (tag == "a" and moment == -1)
        assert harmless == saved["committed"], (moment, saved.get("error"))
        assert Path(loaded["path"]).parent.name == (tag if matches == ["b"] else "a")
        assert not any(layout.is_leftover(name) for name in loaded["there"])
        came_back += matches
    return came_back


def test_a_save_that_is_cut_short(tmp_path: Path, images: list[Image], kind: str) -> None:
    came_back = cut(tmp_path, images, kind, FAST, tag="b", method="link")
    assert came_back[0] == "b"
    assert came_back[-1] == "a"  # before the rename


@pytest.mark.torture
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tag", ["a", "b"])
def test_every_moment(tmp_path: Path, images: list[Image], kind: str, method: str, tag: str) -> None:
    """``tag`` a: the second save takes the place of the first."""
    came_back = cut(tmp_path, images, kind, [None, *range(-1, -25, -1)], tag=tag, method=method)
    assert came_back[0] == "b"
    assert came_back[-1] == "a"
