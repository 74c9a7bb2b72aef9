"""The command line ``nvme-resume``: one file a command, each with its exit codes in its help.

Exit codes of all commands: 0 good, 1 error, 2 usage, 3 good but partial checkpoints exist, 10 no checkpoint,
11 locked, 12 corrupt, 13 incompatible, 14 no space, 130 interrupted.
"""

import typer

from nvme_resume.cli import build_ops, check, doctor, gather, inspect, last, prune, verify

app = typer.Typer(
    name="nvme-resume",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Exact checkpoints for DeepSpeed ZeRO-3 with NVMe offload.",
    epilog="Exit codes: 0 good, 1 error, 2 usage, 3 good but partial checkpoints exist, 10 no checkpoint, "
    "11 locked, 12 corrupt, 13 incompatible, 14 no space, 130 interrupted.",
)


for command in (check, doctor, last, verify, inspect, prune, gather, build_ops):
    command.register(app)


def main() -> None:
    """Entry point of the console script."""
    app()
