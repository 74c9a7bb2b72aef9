"""``nvme-resume inspect``: what lies in a save folder or a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from nvme_resume.cli.output import AsJson, console, show, with_exit_codes
from nvme_resume.errors import NoCheckpointError
from nvme_resume.storage import catalog, records


@with_exit_codes
def inspect(folder: Path, as_json: AsJson = False) -> int:
    """List the checkpoints of a save FOLDER, or describe the checkpoint FOLDER.

    Exit codes: 0 good, 3 good but partial or damaged ones are there too, 10 no checkpoint, 12 corrupt.
    """
    folder = folder.resolve()
    if folder.is_dir() and records.has_manifest(folder):
        return _one(folder, as_json=as_json)
    found = catalog.entries(folder)
    if not found:
        raise NoCheckpointError("no checkpoint here", path=str(folder))
    pointed = catalog.latest(folder)
    latest = None if pointed is None else pointed.tag
    rows = [e._asdict() | {"latest": e.tag == latest} for e in found]
    if as_json:
        show({"checkpoints": rows}, "", as_json=True)
    else:
        table = Table("tag", "step", "written by", "state", title=str(folder))
        for entry in found:
            table.add_row(
                f"{entry.tag}{' (latest)' if entry.tag == latest else ''}",
                "?" if entry.step < 0 else str(entry.step),
                "nvme_resume" if entry.ours else "plain DeepSpeed",
                entry.problem or "complete",
            )
        console.print(table)
    return 3 if any(e.problem for e in found) else 0


def _one(folder: Path, *, as_json: bool) -> int:
    head = records.read_manifest(folder)
    ranks: list[dict[str, Any]] = []
    for rank in range(head.world_size):
        record, seal, _ = records.read_rank(folder, head, rank)
        ranks.append(
            {
                "rank": rank,
                "host": head.ranks[rank].host,
                "sub_groups": len(record.sub_groups),
                "parameters": sum(len(g.params) for g in record.sub_groups),
                "files": len(record.files),
                "bytes": sum(f.size for f in record.files.values()),
                "sealed": seal is not None,
            }
        )
    about = {
        "tag": head.tag,
        "step": head.global_steps,
        "created": head.created,
        "versions": head.versions,
        "settings": head.settings,
    }
    if as_json:
        show({**about, "ranks": ranks}, "", as_json=True)
        return 0
    for name, value in about.items():
        text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
        console.print(f"{name:9} {text}")
    table = Table("rank", "host", "sub-groups", "parameters", "files", "MiB", "hashes")
    for row in ranks:
        table.add_row(
            *(str(row[k]) for k in ("rank", "host", "sub_groups", "parameters", "files")),
            f"{row['bytes'] / (1 << 20):.1f}",
            "yes" if row["sealed"] else "not yet",
        )
    console.print(table)
    return 0


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("inspect")(inspect)
