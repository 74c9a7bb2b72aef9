"""Whatever the order of transfers and saves: the newest checkpoint known to be everywhere stays, and few others."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvme_resume.config import Options
from nvme_resume.nodes import kept
from nvme_resume.nodes.inventory import Held
from nvme_resume.nodes.kept import Former, Kept
from nvme_resume.storage import catalog
from nvme_resume.storage.catalog import Saved

NODES = 3
LINKS = [(one, two) for one in range(NODES) for two in range(NODES) if one != two]
Event = tuple[str, tuple[int, int], int, str]


@pytest.fixture(autouse=True)
def _nothing_in_use() -> None:
    catalog._uses.clear()


def where(node: int, folder: str) -> Path:
    return Path(f"/nowhere/{node}/{folder}")


def saved(node: int, number: int, folder: str) -> Saved:
    return Saved(where(node, folder), f"t{number}", f"id{number}", sealing=True)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["save", "settle", "arrive"]),
            st.sampled_from(LINKS),
            st.integers(0, 5),
            st.sampled_from("aab"),
        ),
        max_size=60,
    )
)
def test_the_newest_that_is_everywhere_stays(events: list[Event]) -> None:
    catalog._uses.clear()
    nodes = [Kept() for _ in range(NODES)]
    settled: dict[int, set[tuple[int, int]]] = {}
    folders: dict[int, str] = {}
    count, known = 0, {"a": 0, "b": 0}
    for what, link, back, folder in events:
        if what == "save":
            said = [node.brought() for node in nodes]
            for node in nodes:
                node.agree([*said, None])
            for number in sorted(n for n in settled if all(n in numbers for numbers in said)):
                # Those that were overtaken by four newer ones may be given up; what was known stays known.
                assert len(settled[number]) == len(LINKS)
                known[folders[number]] = number
            if not back:  # this one does not go along
                continue
            count += 1
            for rank, node in enumerate(nodes):
                links = [pair for pair in LINKS if rank in pair]
                node.begin(count, saved(rank, count, folder), where(rank, folder), links)
            settled[count], folders[count] = set(), folder
        elif count - back in settled:
            for pair in LINKS if what == "arrive" else [link]:
                settled[count - back].add(pair)
                for rank in pair:
                    nodes[rank].settle(count - back, pair)
        for rank in range(NODES):
            for name, newest in known.items():
                mine = [n for n in folders if folders[n] == name]
                stay = {n for n in mine if catalog.is_used(saved(rank, n, name).folder)}
                assert newest in stay or not newest, (newest, stay)
                assert len(stay) <= 6, stay


def test_one_of_a_former_run_stays_until_one_of_this_run_is_everywhere(tmp_path: Path) -> None:
    one = Kept()
    one.keep_former(tmp_path, tmp_path / "old")
    one.keep_former(tmp_path / "other", tmp_path / "other" / "old")
    for number in (1, 2):
        one.agree([one.brought()])
        one.begin(number, Saved(tmp_path, f"t{number}", "id", sealing=True), tmp_path, [(0, 1)])
        assert catalog.is_used(tmp_path / "old")
    one.settle(1, (0, 1))
    one.agree([one.brought(), None])
    assert not catalog.is_used(tmp_path / "old") and catalog.is_used(tmp_path / "other" / "old")
    assert catalog.is_used(tmp_path / "t1") and catalog.is_used(tmp_path / "t2")
    one.settle(2, (0, 1))
    one.agree([[2], [1]])  # the other node has not brought that one
    assert catalog.is_used(tmp_path / "t1") and catalog.is_used(tmp_path / "t2")


def seen(*of_nodes: dict[int, list[int]]) -> list[list[Former]]:
    """By step: the ranks of two whose parts a node holds."""
    return [
        [Former("", Held(f"t{step}", "id", step, 2, ["a", "b"], ranks, [])) for step, ranks in node.items()]
        for node in of_nodes
    ]


def test_the_former_one_that_is_safest() -> None:
    both = [0, 1]
    nodes = seen({1: both, 2: both, 3: [0]}, {1: both, 2: [1], 3: both})
    replicas, gather = Options(replicas=1), Options(gather="main")
    for options, step in ((replicas, 1), (gather, 2), (Options(gather="main", replicas=5), 1)):
        found = kept.safest(nodes, options, 2)
        assert found is not None and found.held.step == step
    assert kept.safest(seen({1: [0]}, {1: [0]}), replicas, 2) is None
    # What earlier runs, with other options, did not copy that often.
    gathered_once = seen({1: both, 2: [0], 3: [0]}, {1: [1], 2: [1]})
    for options in (replicas, gather, Options(gather="main", replicas=1)):
        found = kept.safest(gathered_once, options, 2)
        assert found is not None and found.held.step == 1
    found = kept.safest(seen({1: [0], 2: [0]}, {1: [1], 2: [1]}), replicas, 2)
    assert found is not None and found.held.step == 2


def test_a_folder_is_in_use_however_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run" / "ck").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    give_back = catalog.use(Path("run/ck"))
    assert catalog.is_used(tmp_path / "link" / "ck") and catalog.is_used(tmp_path / "run")
    assert not catalog.is_used(tmp_path)
    give_back()
    assert not catalog.is_used(Path("run/ck"))
