"""``python -m nvme_resume.consistency``: the same command as ``nvme-resume check``."""

import typer

from nvme_resume.consistency.command import check

if __name__ == "__main__":
    typer.run(check)
