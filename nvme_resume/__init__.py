"""Exact checkpoints for DeepSpeed ZeRO-3 with NVMe offload.

``NvmeResumeEngine.wrap(engine)`` after ``deepspeed.initialize``, or ``install()`` once and
``"nvme_checkpoint": true`` in the DeepSpeed configuration.  Importing this package patches nothing.
"""

from typing import TYPE_CHECKING, Any

from nvme_resume.errors import NvmeResumeError
from nvme_resume.version import __version__

if TYPE_CHECKING:
    from nvme_resume.callback import NvmeResumeCallback
    from nvme_resume.engine import NvmeResumeEngine
    from nvme_resume.installer import install
    from nvme_resume.storage.catalog import last_resumable

__all__ = [
    "NvmeResumeCallback",
    "NvmeResumeEngine",
    "NvmeResumeError",
    "__version__",
    "install",
    "last_resumable",
]


def __getattr__(name: str) -> Any:
    # Imported on first use: deepspeed and torch take seconds, and the command line answers without them.
    if name == "NvmeResumeEngine":
        from nvme_resume.engine import NvmeResumeEngine

        return NvmeResumeEngine
    if name == "NvmeResumeCallback":
        from nvme_resume.callback import NvmeResumeCallback

        return NvmeResumeCallback
    if name == "install":
        from nvme_resume.installer import install

        return install
    if name == "last_resumable":
        from nvme_resume.storage.catalog import last_resumable

        return last_resumable
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
