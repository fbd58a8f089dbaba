"""The command `tandem`, put together from its commands: each is a module of this folder, imported when it is wanted.

`tandem status` waits for neither Ray nor torch. Nor does `tandem --help`, which imports all of them: what is slow to import is
imported inside their functions.

Exit codes:

- 0: done.
- 1: a bug, with its traceback; an `audit` that found something; a `leave` whose node was not empty in time; a `certify` of
  which a part failed, or that found no GPU.
- 2: anything that the operator can mend, such as a flag, a file, a port, a full disk, or a cluster that is not there. One line
  on stderr names it.
- 3: of `tandem serve` alone: what it needs does not answer, the cluster did not come up in time, or it was lost. One line on
  stderr says why. The next start may succeed, so systemd makes one.
- 130: interrupted.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from cluster import __version__
from cluster.commands.lib.exits import INTERRUPTED, MENDABLE, drop_unwritten, full_disk, replace_what_has_no_code, say
from cluster.commands.lib.lazy_commands import lazy_group
from protocol.errors import TandemError

COMMANDS = (
    "bench",
    "keep-gcs",
    "plan",
    "profile",
    "certify",
    "serve",
    "stop",
    "status",
    "top",
    "workers/scale",
    "autoscale",
    "workers/flip",
    "workers/drain",
    "workers/leave",
    "workers/rollout",
    "audit",
    "cache",
    "models",
    "chat",
    "keys",
    "usage",
)
"""The modules of the commands, in the order of the help."""

app = typer.Typer(
    name="tandem",
    cls=lazy_group("cluster.commands", COMMANDS),
    help="Serve language models with prefill and decode in separate pools of workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tandem {__version__}")
        raise typer.Exit()


@app.callback()
def tandem(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that stand before a command. What they do happens while they are read."""


def main() -> None:
    """Run the command `tandem` and exit with its code."""
    replace_what_has_no_code()
    try:
        code = app(standalone_mode=False)
    except (TandemError, typer.TyperException) as error:
        say(error)
        code = MENDABLE
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except OSError as error:
        say(full_disk(error))
        code = MENDABLE
    drop_unwritten()
    sys.exit(code)
