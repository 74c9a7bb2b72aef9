"""Bring the parts of a checkpoint of plain DeepSpeed together that nodes with disks of their own hold.

Under ``use_node_local_storage`` DeepSpeed (0.19.8, ``engine.py::save_checkpoint``) names the folders of swap files by
LOCAL rank, so that two nodes both write ``rank00``; its ``.pt`` files carry global ranks.  Here all are named by global
rank, as DeepSpeed does on one machine.  It writes no hashes: what is copied is compared with what else has its
name, not with what was saved.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from nvme_resume import layout
from nvme_resume.config import Options
from nvme_resume.errors import ConfigError, NoCheckpointError
from nvme_resume.storage import catalog, commit, room, transfer
from nvme_resume.storage import disk as seam
from nvme_resume.storage.gather import Gathered, beside

_OPTIM = re.compile(r"^(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt$")
_FOLDER = re.compile(r"^rank(\d{2,})$")
_SLACK_BYTES = 16 << 20


def find(sources: Sequence[Path], tag: str | None) -> tuple[str, list[Path]]:
    """The tag (default: what ``latest`` names on a node, else the newest) and the folders that have it."""
    if tag is None:
        named = [name for source in sources if (name := catalog.read_latest(source)) is not None]
        there = [name for source in sources for name in catalog.tags(source)[-1:]]
        tag = next(iter([*named, *there]), None)
    folders = [source / tag for source in sources if tag is not None and (source / tag).is_dir()]
    folders = [folder for folder in folders if ranks_of(folder)]
    if tag is None or not folders:
        raise NoCheckpointError(
            "no checkpoint in any of the folders", tag=tag, path=", ".join(map(str, sources))
        )
    return tag, folders


def ranks_of(folder: Path) -> list[int]:
    """The global ranks whose optimizer files lie in a tag folder."""
    return sorted(int(match[1]) for path in folder.iterdir() if (match := _OPTIM.match(path.name)))


def gather(
    tag: str, folders: Sequence[Path], world_size: int, into: Path, options: Options, *, show: bool
) -> Gathered:
    """Make ``into / tag`` hold all ranks' files.  The caller owns ``into``.

    Raises NoCheckpointError naming ranks nobody has, ConfigError when it cannot be told whose swap files are whose or
    when two folders have different files of one name, NoSpaceError, StorageError, OSError; then ``into`` is as it was.
    """
    wanted = _wanted(folders)
    there = {rank for folder in folders for rank in ranks_of(folder)}
    if missing := sorted(set(range(world_size)) - there):
        raise NoCheckpointError(
            f"nobody has the files of ranks {missing}",
            tag=tag,
            path=", ".join(map(str, folders)),
            hint="bring the folders of the other nodes",
        )
    target = into / tag
    sources = [folder.parent for folder in folders]
    if _is_there(target, wanted, refuse=target not in folders):
        return Gathered(target, tag, None, world_size, beside(sources, into, tag, options))
    save_id = uuid.uuid4().hex[:12]
    staging = into / layout.staging(tag, save_id)
    disk = seam.current()
    try:
        for parent in {(staging / name).parent for name in wanted}:
            disk.make_folder(parent)
        needs = room.Needs("this machine")
        needs.add(into, sum(p.stat().st_size for p in wanted.values()) + _SLACK_BYTES, len(wanted))
        room.refuse_too_little([needs.plain()], "the gathered checkpoint", tag=tag)
        copies = [transfer.Copy(path, staging / name) for name, path in wanted.items()]
        found = transfer.run(copies, options, what=f"gather {tag}", sync=True, show=show)
        commit.sync_all([], commit.folders_of(staging))
        commit.move_in(staging, target, save_id)
    except BaseException:
        disk.remove_tree(staging)
        raise
    # Without records nothing tells the steps of two tags: what the nodes call the latest is.
    if catalog.read_latest(into) is None or tag in [catalog.read_latest(source) for source in sources]:
        temporary = into / f"{layout.STAGING_PREFIX}{layout.LATEST}.{save_id}"
        disk.write(temporary, tag.encode())
        disk.rename(temporary, into / layout.LATEST)
        disk.sync_folder(into)
    moved = sum(f.size for f in found) + beside(sources, into, tag, options)
    return Gathered(target, tag, None, world_size, moved)


def _is_there(target: Path, wanted: Mapping[str, Path], *, refuse: bool) -> bool:
    """Is all of it there already, to the byte?  ConfigError (``refuse``) when something else is."""
    whole = True
    for name, path in wanted.items():
        there = target / name
        if there.is_file() and (there == path or _same(there, path)):
            continue
        whole = False
        if refuse and os.path.lexists(there):
            raise ConfigError(
                "another checkpoint has that tag in the target",
                tag=target.name,
                path=str(there),
                expected=f"what is in {path}",
                hint="gather into an empty folder",
            )
    return whole


def _wanted(folders: Sequence[Path]) -> dict[str, Path]:
    """Name in the gathered folder -> file."""
    found: dict[str, Path] = {}
    for folder in folders:
        names = _global_names(folder)
        for path in sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()):
            parts = list(path.relative_to(folder).parts)
            if parts[0] == layout.SWAP and len(parts) > 2:
                if parts[1] not in names:
                    continue  # left there by somebody else
                parts[1] = names[parts[1]]
            name = "/".join(parts)
            if name not in found:
                found[name] = path
            elif not _same(found[name], path):
                raise ConfigError(
                    "two folders have different files of that name",
                    path=str(path),
                    expected=f"what is in {found[name]}",
                    hint="leave out the folder that belongs to another run",
                )
    return found


def _global_names(folder: Path) -> dict[str, str]:
    """Folder of swap files -> what it is called by global rank."""
    ranks = ranks_of(folder)
    swap = folder / layout.SWAP
    there = sorted(p.name for p in swap.iterdir() if _FOLDER.match(p.name)) if swap.is_dir() else []
    by_global = [layout.rank_folder(rank) for rank in ranks]
    if set(by_global) <= set(there) or not there:
        return {name: name for name in by_global}
    by_local = [layout.rank_folder(local) for local in range(len(ranks))]
    if there != by_local:
        raise ConfigError(
            "cannot tell whose swap files these are",
            tag=folder.name,
            path=str(swap),
            expected=f"{', '.join(by_local)} (local ranks) or {', '.join(by_global)}",
            found=", ".join(there),
            hint="gather the folders as the nodes wrote them",
        )
    return dict(zip(by_local, by_global, strict=True))


def _same(one: Path, other: Path) -> bool:
    if one.stat().st_size != other.stat().st_size:
        return False
    copies = [transfer.Copy(one), transfer.Copy(other)]
    first, second = transfer.run(copies, Options(), what="compare", sync=False)
    return first.digest == second.digest
