"""Whatever the order of transfers and saves: the newest checkpoint known to be everywhere stays, and few others."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from nvme_resume.nodes.kept import Kept
from nvme_resume.storage import catalog
from nvme_resume.storage.catalog import Saved

NODES = 3
LINKS = [(one, two) for one in range(NODES) for two in range(NODES) if one != two]
Event = tuple[str, tuple[int, int], int]


def saved(node: int, number: int) -> Saved:
    return Saved(Path(f"/nowhere/{node}"), f"t{number}", f"id{number}", sealing=True)


def held(node: int, most: int) -> set[int]:
    return {n for n in range(1, most + 1) if catalog.in_use[saved(node, n).folder]}


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["save", "settle", "arrive"]), st.sampled_from(LINKS), st.integers(0, 5)),
        max_size=60,
    )
)
def test_the_newest_that_is_everywhere_stays(events: list[Event]) -> None:
    catalog.in_use.clear()
    nodes = [Kept() for _ in range(NODES)]
    settled: dict[int, set[tuple[int, int]]] = {}
    count = known = 0
    for what, link, back in events:
        if what == "save":
            said = [node.brought() for node in nodes]
            for node in nodes:
                node.agree([*said, None])
            everywhere = [n for n, links in settled.items() if len(links) == len(LINKS)]
            if not back:  # this one does not go along
                continue
            count += 1
            for rank, node in enumerate(nodes):
                node.begin(count, saved(rank, count), [pair for pair in LINKS if rank in pair], loose=False)
            settled[count] = set()
            # Those that were overtaken by four newer ones may be given up; what was known stays known.
            known = max(
                [n for n in everywhere if all(n in numbers for numbers in said)], default=known
            )  # fmt: skip
        elif count - back in settled:
            for pair in LINKS if what == "arrive" else [link]:
                settled[count - back].add(pair)
                for rank in pair:
                    nodes[rank].settle(count - back, pair)
        for rank in range(NODES):
            stay = held(rank, count)
            assert known in stay or not known, (known, stay)
            assert len(stay) <= 6, stay


def test_what_former_runs_left_stays_until_one_of_this_run_is_everywhere(tmp_path: Path) -> None:
    catalog.in_use.clear()
    for tag in ("old", "older"):
        (tmp_path / tag / "nvme_resume").mkdir(parents=True)
    kept = Kept()
    for number in (1, 2):
        kept.agree([kept.brought()])
        kept.begin(number, Saved(tmp_path, f"t{number}", "id", sealing=True), [(0, 1)], loose=False)
        assert catalog.in_use[tmp_path / "old"] == catalog.in_use[tmp_path / "older"] == 1
    kept.settle(1, (0, 1))
    kept.agree([kept.brought(), None])
    assert not catalog.in_use[tmp_path / "old"] and not catalog.in_use[tmp_path / "older"]
    assert catalog.in_use[tmp_path / "t1"] and catalog.in_use[tmp_path / "t2"]
    kept.settle(2, (0, 1))
    kept.agree([[2], [1]])  # the other node has not brought that one
    assert catalog.in_use[tmp_path / "t1"] and catalog.in_use[tmp_path / "t2"]
