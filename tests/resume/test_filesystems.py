"""Every way to save, on every file system, and from one to another: the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import harness

pytestmark = pytest.mark.matrix

METHODS = {
    "ext4": ["link", "server", "direct"],
    "xfs": ["link", "reflink", "server", "direct"],
    "btrfs": ["link", "reflink", "server", "direct"],
    "tmpfs": ["link", "server", "direct"],
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    run = harness.run(tmp_path_factory.mktemp("whole"), "whole", mode="stock", until=4)
    losses: list[str] = run.ranks[0]["losses"]
    return losses


def test_all_methods_and_another_file_system(
    tmp_path: Path, mounted: tuple[str, Path], whole: list[str]
) -> None:
    kind, place = mounted
    places = [(method, place / method) for method in METHODS[kind]]
    for method, checkpoint in [*places, ("auto", tmp_path / "elsewhere")]:
        for name, case in (
            ("first", {"until": 2, "saves": [{"at": 2, "dir": str(checkpoint)}]}),
            ("resumed", {"until": 4, "load": str(checkpoint), "seed": 9}),
        ):
            run = harness.run(
                tmp_path,
                f"{name}-{method}",
                nvme_path=str(place / "nvme"),
                nvme_checkpoint={"method": method},
                **case,
            )
            if name == "first":
                word = {"auto": "the O_DIRECT copier", "link": "links"}.get(method)
                assert word is None or f"by {word}" in run.log
        assert run.ranks[0]["losses"] == whole[2:], (kind, method)
