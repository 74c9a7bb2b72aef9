"""Which checkpoints a save folder holds, and which one a load means."""

from __future__ import annotations

from pathlib import Path

from nvme_resume import layout
from nvme_resume.errors import ConfigError, NoCheckpointError
from nvme_resume.storage import disk as seam


def read_latest(save_dir: Path) -> str | None:
    """The tag that ``latest`` names, or None when there is no such file."""
    path = save_dir / layout.LATEST
    if not path.is_file():
        return None
    return seam.current().read(path, 4096).decode("utf-8", "replace").strip()


def tags(save_dir: Path) -> list[str]:
    """Folders that may be checkpoints, oldest first."""
    if not save_dir.is_dir():
        return []
    found = [
        p
        for p in save_dir.iterdir()
        if p.is_dir()
        and not layout.is_leftover(p.name)
        and ((p / layout.RECORDS).is_dir() or any(p.glob("*_model_states.pt")))
    ]
    return [p.name for p in sorted(found, key=lambda p: (p.stat().st_mtime_ns, p.name))]


def choose(load_dir: Path, tag: str | int | None) -> str | None:
    """The tag to load: the one asked for, else the one ``latest`` names, else None.

    Raises NoCheckpointError when the named one is not there.
    """
    if tag is None:
        chosen = read_latest(load_dir)
        if chosen is None:
            return None
    else:
        chosen = str(tag)
    if not layout.valid_tag(chosen):
        raise ConfigError("not a usable tag", tag=chosen, expected="one plain folder name")
    if not (load_dir / chosen).is_dir():
        there = tags(load_dir)
        raise NoCheckpointError(
            "no such checkpoint",
            tag=chosen,
            path=str(load_dir / chosen),
            hint=f"tags there: {', '.join(there) or 'none'}",
        )
    return chosen


def leftovers(save_dir: Path) -> list[Path]:
    """What interrupted saves left behind."""
    if not save_dir.is_dir():
        return []
    return sorted(p for p in save_dir.iterdir() if layout.is_leftover(p.name))
