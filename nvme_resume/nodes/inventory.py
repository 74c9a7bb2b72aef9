"""What each rank sees of the checkpoints in its folder, which one all have together, and what has to go where.

Data, and decisions that every rank takes alike; ``supply`` acts on them.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from nvme_resume import layout
from nvme_resume.config import Options
from nvme_resume.errors import NoCheckpointError, NvmeResumeError
from nvme_resume.storage import catalog, records, verify


class Held(NamedTuple):
    """What one rank sees of one checkpoint; plain data."""

    tag: str
    checkpoint_id: str
    step: int
    world_size: int  # 0: the manifest is damaged
    hosts: list[str]  # by saved rank
    ranks: list[int]  # saved ranks whose files are all there
    problems: list[str]  # of others

    @property
    def key(self) -> tuple[str, str]:
        """Which checkpoint it is, wherever it lies."""
        return self.tag, self.checkpoint_id


class Delivery(NamedTuple):
    """From one publisher to another, for good."""

    source: int
    target: int
    ranks: tuple[int, ...]


def take(
    folder: Path, tags: Iterable[str] | None, read: str | None, share: catalog.Share, options: Options
) -> list[Held]:
    """All checkpoints of ours in the folder, and the ranks of ``share`` whose files are there.

    Of the tag ``read`` every byte is compared.
    """
    found = []
    for tag in catalog.tags(folder) if tags is None else tags:
        try:
            if not (folder / tag).is_dir() or not records.has_manifest(folder / tag):
                continue
            head = records.read_manifest(folder / tag)
        except NvmeResumeError as error:
            found.append(Held(tag, records.left_of(folder / tag) or "", -1, 0, [], [], [str(error)]))
            continue
        if head.tag != tag:
            continue
        ranks, problems = [], []
        for rank in share(head.world_size):
            if not (folder / tag / layout.rank_record(rank)).is_file():
                continue
            try:
                record, seal, _ = records.read_rank(folder / tag, head, rank)
                if tag == read and seal is not None:
                    verify.full(folder / tag, seal.files, options, rank=rank, tag=tag)
                else:
                    verify.structure(folder / tag, record.files, rank=rank, tag=tag)
            except (NvmeResumeError, OSError) as error:
                problems.append(str(error))
            else:
                ranks.append(rank)
        hosts = [entry.host for entry in head.ranks]
        found.append(
            Held(tag, head.checkpoint_id, head.global_steps, head.world_size, hosts, ranks, problems)
        )
    return found


def choose(
    inventories: Sequence[Sequence[Held]],
    tag: str | None,
    named: Collection[str],
    where: str,
    skipped: Container[tuple[str, str]],
) -> Held | None:
    """The checkpoint to bring about: the one that is named, else the newest that all have together.

    None where there is none of ours.  NoCheckpointError naming the hosts whose parts nobody has.
    """
    every: dict[tuple[str, str], Held] = {}
    together: dict[tuple[str, str], set[int]] = {}
    for held in (h for rank in inventories for h in rank):
        if held.world_size and held.key not in skipped:
            every.setdefault(held.key, held)
            together.setdefault(held.key, set()).update(held.ranks)
    whole = [h for key, h in every.items() if together[key] == set(range(h.world_size))]
    if every and not whole:
        raise _incomplete(every, together, inventories, named, where)
    return max(whole, key=lambda h: (h.tag in named, h.step), default=None)


def _incomplete(
    every: Mapping[tuple[str, str], Held],
    together: Mapping[tuple[str, str], set[int]],
    inventories: Sequence[Sequence[Held]],
    named: Collection[str],
    where: str,
) -> NoCheckpointError:
    """Whose parts are missing of the checkpoint that comes closest to what was asked for, and why."""
    held = max(every.values(), key=lambda h: (h.tag in named, h.step))
    namesakes = [h for h in every.values() if h.tag == held.tag]
    if len(namesakes) > 1:
        return NoCheckpointError(
            f"the nodes hold {len(namesakes)} different checkpoints of that tag, and none of them whole",
            tag=held.tag,
            path=where,
            expected=f"all of {held.checkpoint_id}",
            found=", ".join(f"ranks {sorted(together[h.key])} of {h.checkpoint_id}" for h in namesakes),
            hint="remove the folder that belongs to another run",
        )
    missing = sorted(set(range(held.world_size)) - together[held.key])
    hosts = ", ".join(sorted({held.hosts[rank] for rank in missing}))
    problems = dict.fromkeys(p for rank in inventories for h in rank if h.tag == held.tag for p in h.problems)
    return NoCheckpointError(
        f"no node has the files of ranks {missing}",
        tag=held.tag,
        path=where,
        expected=f"those that {hosts} saved",
        found="; ".join([f"ranks {sorted(together[held.key])}", *problems]),
        hint=f"bring the disk of {hosts}, or name another tag",
    )


def without_manifest(inventories: Sequence[Sequence[Held]]) -> dict[tuple[str, str], int]:
    """Checkpoints whose manifest is damaged somewhere, and a rank that has a good one."""
    every = [(rank, held) for rank, inventory in enumerate(inventories) for held in inventory]
    lost = {held.key for _, held in every if not held.world_size and held.checkpoint_id}
    return {held.key: rank for rank, held in reversed(every) if held.key in lost and held.world_size}


def merged(inventories: Sequence[Sequence[Held]]) -> list[Held]:
    """What ranks that share a folder have found, each its share."""
    found: dict[tuple[str, str], Held] = {}
    for held in (h for rank in inventories for h in rank):
        before = found.get(held.key)
        ranks, problems = (before.ranks, before.problems) if before else ([], [])
        found[held.key] = held._replace(
            ranks=sorted({*ranks, *held.ranks}), problems=[*dict.fromkeys([*problems, *held.problems])]
        )
    return list(found.values())


def is_missed(inventories: Sequence[Sequence[Held]], chosen: Held) -> bool:
    """Does any rank lack what it reads when it loads that checkpoint?"""
    return any(
        _lacks(inventory, chosen, rank, len(inventories)) for rank, inventory in enumerate(inventories)
    )


def _holds(inventory: Sequence[Held], chosen: Held) -> set[int]:
    return {r for held in inventory if held.key == chosen.key for r in held.ranks}


def _lacks(inventory: Sequence[Held], chosen: Held, rank: int, world_size: int) -> bool:
    return not set(catalog.read_by(rank, world_size)(chosen.world_size)) <= _holds(inventory, chosen)


def plan(
    inventories: Sequence[Sequence[Held]], chosen: Held, places: Sequence[tuple[int, ...]]
) -> list[Delivery]:
    """What goes where: each place gets what its ranks need and it lacks, from the places that have it, in turns."""
    world = len(inventories)
    holders = {ranks[0]: _holds(inventories[ranks[0]], chosen) for ranks in places}
    given = dict.fromkeys(holders, 0)
    found: dict[tuple[int, int], list[int]] = {}
    for ranks in places:
        target = ranks[0]
        wanted = (
            set().union(*(set(catalog.read_by(rank, world)(chosen.world_size)) for rank in ranks))
            - holders[target]
        )
        for rank in sorted(wanted):
            source = min((p for p in holders if rank in holders[p]), key=lambda p: (given[p], p))
            given[source] += 1
            found.setdefault((source, target), []).append(rank)
    return [Delivery(source, target, tuple(ranks)) for (source, target), ranks in sorted(found.items())]
