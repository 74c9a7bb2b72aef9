"""What two nodes say to each other, in two threads: nonsense, changes of mind, and that both ends hear of an error."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from nvme_resume.config import Options
from nvme_resume.errors import NoCheckpointError, NvmeResumeError, PeerError, ReplacedError
from nvme_resume.nodes import links, session
from nvme_resume.nodes.channel import Channel, Meeting, Node
from nvme_resume.nodes.messages import Ask, Hello, Message, Offer, Sent, Told, Turn
from nvme_resume.nodes.session import Errand
from nvme_resume.storage import audit, catalog, records
from nvme_resume.storage.background import Background, Gate
from nvme_resume.storage.intake import Intake
from nvme_resume.storage.limit import Limit
from tests.storage import test_remote

SECONDS = 5.0
Ends = tuple[Channel, Channel]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    """Both ends of a channel, in this process."""
    store = dist.HashStore()
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    return connect((0, 1))


def connect(pair: tuple[int, int]) -> Ends:
    meeting = Meeting("here", [Node(0, "one"), Node(1, "two")])
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda rank: Channel(meeting, pair, rank, SECONDS), pair)
    return one, two


def both(one: Callable[[], Any], two: Callable[[], Any]) -> list[Any]:
    """What each returns, or the error of ours that it raises."""

    def outcome(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except NvmeResumeError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(outcome, (one, two)))


def errand(folder: Path, checkpoint_id: str, *ranks: int, new: bool = False) -> Errand:
    """After a commit, or (``new``) before a load."""
    return Errand(folder.parent, folder.name, checkpoint_id, ranks or (0, 1), live=not new, new=new)


def serve(channel: Channel, wanted: Errand) -> Any:
    return session.serve(channel, wanted, Limit(0), Gate(), Options())


def fetch(channel: Channel, wanted: Errand) -> Any:
    return session.fetch(channel, wanted, Options(), Gate(), lambda _: None)


def test_each_way_has_a_channel_of_its_own(ends: Ends) -> None:
    back = connect((1, 0))
    for number, (one, two) in enumerate([ends, back]):
        turn = Turn(number=number)
        assert both(partial(one.send, turn), partial(two.receive, Turn)) == [None, turn]
    assert [str(e.there) for e in (*ends, *back)] == [
        f"rank {r} on {h}" for r, h in ((1, "two"), (0, "one"))
    ] + [f"rank {r} on {h}" for r, h in ((0, "one"), (1, "two"))]


def test_both_ends_know_how_it_went(tmp_path: Path, ends: Ends) -> None:
    source = test_remote.make(tmp_path / "one")
    target = tmp_path / "two" / source.name
    target.parent.mkdir()
    saved = records.read_manifest(source).checkpoint_id
    wanted = errand(target, saved, new=True)
    for found in both(lambda: serve(ends[0], errand(source, saved, 1)), lambda: fetch(ends[1], wanted)):
        assert isinstance(found, NvmeResumeError) and "does not have this rank's part" in str(found)
    sent, came = both(lambda: serve(ends[0], errand(source, saved)), lambda: fetch(ends[1], wanted))
    assert sent.nbytes == came.nbytes > test_remote.BIG
    assert not target.exists()
    with Intake(target.parent, came.head, "here") as inbox:
        inbox.publish(latest=False)
    audit.check(target, "full")


def test_what_was_removed_does_not_come_back_in_part(tmp_path: Path, ends: Ends) -> None:
    """A checkpoint of this run that somebody removed on one node before its transfer."""
    source = test_remote.make(tmp_path / "one")
    target = tmp_path / "two" / source.name
    target.parent.mkdir()
    saved = records.read_manifest(source).checkpoint_id
    found = both(lambda: serve(ends[0], errand(source, saved)), lambda: fetch(ends[1], errand(target, saved)))
    assert [type(f) for f in found] == [ReplacedError, ReplacedError], found
    assert list(target.parent.iterdir()) == []


def test_another_runs_checkpoint_is_not_called_saved_again(tmp_path: Path, ends: Ends) -> None:
    source, target = (test_remote.make(tmp_path / name) for name in ("one", "two"))
    saved = records.read_manifest(source).checkpoint_id
    other = records.read_manifest(target).model_copy(update={"checkpoint_id": "f" * 12})
    (target / "nvme_resume/manifest.json").unlink()
    records.write(target, "nvme_resume/manifest.json", other)
    wanted = errand(target, saved, new=True)
    for found in both(lambda: serve(ends[0], errand(source, saved)), lambda: fetch(ends[1], wanted)):
        assert type(found) is NoCheckpointError and "belongs to another run" in str(found), found


@pytest.mark.parametrize("side", [0, 1])
def test_a_tag_that_was_saved_again_is_told_to_the_other_end(tmp_path: Path, ends: Ends, side: int) -> None:
    """One node has committed the new one, the other has not yet."""
    folders = [test_remote.make(tmp_path / name) for name in ("one", "two")]
    head = records.read_manifest(folders[side])
    saved = head.checkpoint_id
    (folders[side] / "nvme_resume/manifest.json").unlink()
    newer = head.model_copy(update={"checkpoint_id": "f" * 12})
    records.write(folders[side], "nvme_resume/manifest.json", newer)
    found = both(
        lambda: serve(ends[0], errand(folders[0], saved)), lambda: fetch(ends[1], errand(folders[1], saved))
    )
    assert [type(f) for f in found] == [ReplacedError, ReplacedError], found
    assert catalog.is_still(folders[1 - side], saved) and not catalog.is_still(folders[side], saved)
    # The talk is in step: the next one goes as ever.
    last = Turn(number=None)
    assert both(lambda: ends[0].send(last), lambda: ends[1].receive(Turn)) == [None, last]


@pytest.mark.parametrize(
    "said",
    [
        Ask(file="../../etc/passwd", length=1),
        Ask(file="", length=1 << 40),
        Hello(skip=True),
        Offer(head="{"),
        Turn(number=3),
    ],
)
def test_what_is_not_understood_ends_the_talk(tmp_path: Path, ends: Ends, said: Message) -> None:
    source = test_remote.make(tmp_path / "one")
    saved = records.read_manifest(source).checkpoint_id

    def talk() -> None:
        ends[1].send(Hello())
        ends[1].receive(Offer)
        ends[1].send(said)

    found, _ = both(lambda: serve(ends[0], errand(source, saved)), talk)
    assert isinstance(found, PeerError) and "rank 1 on two" in str(found), found


@pytest.mark.parametrize("text", [b"[]", b"{}", b"not json", b'{"number": "x"}', b"\xff\xfe"])
def test_bytes_that_are_no_message(ends: Ends, text: bytes) -> None:
    def send() -> None:
        length = torch.tensor([len(text)], dtype=torch.int64).view(torch.uint8)
        for data in (length, torch.frombuffer(bytearray(text), dtype=torch.uint8)):
            ends[0].finish(ends[0]._group.send([data], 1, 0))

    _, found = both(send, lambda: ends[1].receive(Turn))
    assert isinstance(found, PeerError) and "not understood" in str(found)


def test_what_is_given_up_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """What has failed is tried again with the next ones, the last two; the others are named."""
    link = links._Link((0, 1), True, Node(1, "two"), (0,), None, Background())
    for number in range(1, 5):
        link.errands[number] = errand(Path(f"ck/t{number}"), "id")
        link.owed.add(number)
        links._give_up_old(link, number)
    assert link.owed == {3, 4}
    said = [r.getMessage() for r in caplog.records]
    assert [s.split(" ")[0] for s in said] == ["ck/t1", "ck/t2"] and "rank 1 on two" in said[0]


def test_errors_keep_their_kind_and_facts_over_the_wire() -> None:
    error = ReplacedError("gone", tag="t", offset=3, rank=1, path="/x")
    back = Sent.model_validate_json(Sent(error=Told.of(error)).model_dump_json()).error
    assert back is not None
    found = back.error("rank 1 on two")
    assert type(found) is ReplacedError and found.facts() == error.facts()
    assert "rank 1 on two: gone" in str(found)
    assert type(Told(kind="os", text="x", facts={"nonsense": 1}).error("y")) is NvmeResumeError
