"""The ``"nvme_checkpoint"`` section of the DeepSpeed configuration.

``true`` switches the extension on with the defaults below, ``false`` off, an object sets options.  Unknown
keys are an error that names them.  Why pydantic: DeepSpeed and its users know it already, and its messages
name the offending key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from nvme_resume.errors import ConfigError

KEY = "nvme_checkpoint"
_BLOCK_MIB = 4  # what goes to another node at once
_UPLOADED_AT_ONCE_MIB = 32  # what uploads may be about to send
_OF_THE_JOB = {"gather", "replicas", "upload", "keep_last", "background_save"}


class Options(BaseModel):
    """Options of one engine; every field may be set in the ``nvme_checkpoint`` object."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    enabled: bool = Field(True, description="false is the same as leaving the key out")
    rng: bool = Field(True, description="save and restore random states (python, numpy, torch, accelerator)")
    verify: Literal["background", "full", "sampled", "structure"] = Field(
        "background",
        description="what a load checks: every byte, those of adopted files while they are read or before the first "
        "step touches them; every byte before anything is touched; some 4 MiB chunks of every file; or records and "
        "sizes only",
    )
    method: Literal["auto", "link", "reflink", "server", "direct"] = Field(
        "auto",
        description="how swap files get into the checkpoint: the first of the list that works between the two folders "
        "(hard link, FICLONE, copy_file_range, the O_DIRECT copier), or that one alone",
    )
    seal: Literal["background", "before_commit"] = Field(
        "background",
        description="when the hashes of linked files are taken: after the commit, or while training waits",
    )
    background_save: bool = Field(
        False,
        alias="async",
        description="return from save_checkpoint before a copy to another filesystem is complete; it is committed by a "
        "background thread (links are instant and do not need it)",
    )
    exit_seconds: float = Field(
        60.0, ge=0, description="how long the end of the process waits for hashes that are still being taken"
    )
    keep_last: int | None = Field(
        None, ge=1, description="after each save, remove complete checkpoints beyond the newest that many"
    )
    timeout_seconds: float = Field(1800.0, gt=0, description="how long a rank waits for the others")
    gather: Literal["main"] | None = Field(
        None,
        description="nodes with disks of their own: after each commit bring every node's files to the save folder of "
        "the node with rank 0 as well, in the background",
    )
    replicas: int = Field(
        0,
        ge=0,
        description="nodes with disks of their own: keep every node's files on that many other nodes as well, so that "
        "the run resumes when as many nodes are lost; each takes the room of one more checkpoint",
    )
    upload: str | None = Field(
        None,
        pattern=r"^[^/\s]+://.+",
        description="a URL (s3://bucket/run, gs://..., file:///folder, anything that fsspec knows): committed "
        "checkpoints are uploaded there in the background",
    )
    download_dir: str | None = Field(
        None,
        description="where a load from a URL puts what it downloads, and leaves it; default: a private folder below "
        "nvme_path that goes after the load",
    )
    network_limit_mib: float = Field(
        0.0, ge=0, description="MiB/s that a node may send to others, and may upload; 0: no limit"
    )
    engine: Literal["auto", "threads", "libaio"] = Field("auto", description="how the copier queues its I/O")
    direct: Literal["auto", "on", "off"] = Field("auto", description="O_DIRECT in the copier")
    block_mib: int = Field(16, ge=1, le=256, description="size of one copier request in MiB")
    in_flight: int = Field(4, ge=1, le=64, description="copier requests in flight")
    bandwidth_limit_mib: float = Field(0.0, ge=0, description="MiB/s the copier may use; 0: no limit")

    @model_validator(mode="after")
    def _blocks_come_in_time(self) -> Options:
        """Else a node that sends slowly looks like one that is gone."""
        to_nodes = self.replicas + (self.gather is not None)
        at_once = _BLOCK_MIB * to_nodes + (_UPLOADED_AT_ONCE_MIB if to_nodes and self.upload else 0)
        if self.network_limit_mib and self.network_limit_mib * self.timeout_seconds < at_once:
            raise ValueError(
                f"{self.network_limit_mib:g} MiB/s (network_limit_mib) bring no block of {_BLOCK_MIB} MiB to each "
                f"other node within {self.timeout_seconds:g} s (timeout_seconds)"
            )
        return self

    def of_the_job(self) -> dict[str, Any]:
        """What must be the same on all ranks, or one waits for what another never does.  Plain data."""
        return self.model_dump(include=_OF_THE_JOB, by_alias=True)


def nvme_offloads(settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The offload sections of a DeepSpeed configuration whose device is NVMe, by their keys."""
    zero = settings.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    sections = {key: zero.get(key) for key in ("offload_optimizer", "offload_param")}
    return {k: v for k, v in sections.items() if isinstance(v, dict) and v.get("device") == "nvme"}


def nvme_paths(settings: dict[str, Any]) -> list[Path]:
    """Where a DeepSpeed configuration swaps, each path once."""
    paths = [str(o["nvme_path"]) for o in nvme_offloads(settings).values() if o.get("nvme_path")]
    return [Path(path) for path in dict.fromkeys(paths)]


def parse(value: Any) -> Options | None:
    """Options for the value of the ``nvme_checkpoint`` key; None when the key is absent or says no.

    Raises ConfigError that names the unknown or bad key.
    """
    if value is None or value is False:
        return None
    if value is True:
        return Options()
    if isinstance(value, Options):
        return value if value.enabled else None
    if not isinstance(value, dict):
        raise ConfigError(
            f'"{KEY}" must be true, false or an object of options',
            expected="true | false | {...}",
            found=repr(value),
            hint=f'write "{KEY}": true in the DeepSpeed configuration',
        )
    try:
        options = Options.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join([KEY, *map(str, first["loc"])])
        if first["type"] == "extra_forbidden":
            message = f'unknown key "{key}"'
        else:
            message = f'bad value for "{key}": {first["msg"]}'
        raise ConfigError(
            message,
            expected=f"one of {', '.join(sorted(f.alias or n for n, f in Options.model_fields.items()))}",
            found=repr(first.get("input", key)),
            hint="correct that key in the DeepSpeed configuration",
        ) from None
    return options if options.enabled else None
