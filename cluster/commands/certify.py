"""`tandem certify`: proves on a machine with GPUs what the tests can't prove without. The work is done in `certify`."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from typer import Option

from cluster import __version__
from cluster.commands.lib.interrupts import undone_when_ended
from protocol.errors import InvalidRequestError

if TYPE_CHECKING:
    from certify.catalogue import Part
    from certify.runner import PartResult


def certify(
    output: Annotated[Path | None, Option(help="Folder of the report; by default ./tandem-certify-DATE.")] = None,
    part: Annotated[list[str] | None, Option(help="Run this part only; may be given several times.")] = None,
    list_parts: Annotated[bool, Option("--list", help="Name the parts, and run none.")] = False,
    device: Annotated[
        Literal["cuda", "cpu"], Option(help="cpu: a rehearsal of what a processor can run, in small sizes.")
    ] = "cuda",
) -> None:
    """Prove on this machine's GPUs that Tandem computes, hands over and serves as it should, and how fast.

    Every part runs in a process of its own and has a limit. The report is printed, and written as Markdown and JSON beside the
    parts' logs. The exit code is 0 only if nothing failed. It takes some minutes, in which nothing else should compute. Ctrl-C
    ends it; the report then has what was found until then.
    """
    from certify.catalogue import chosen_parts
    from certify.report import MARKDOWN, verdict, write_report
    from loadtest.report import check_file

    parts = chosen_parts(part or ())
    if list_parts:
        for each in parts:
            typer.echo(f"{each.name:10} at most {each.limit_s:3g} s  {each.proves}")
        return
    if device == "cuda" and not _has_gpu():
        typer.echo("tandem: there is no GPU that torch can use here; --device cpu rehearses on the processor", err=True)
        raise typer.Exit(1)
    folder = output or Path(f"tandem-certify-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequestError(f"{folder}: can't be made: {error.strerror}", param="output") from None
    check_file(folder / MARKDOWN, "output")
    about = {"version": __version__, "date": time.strftime("%Y-%m-%d %H:%M"), "device": device, "system": platform.system()}
    results: list[PartResult] = []
    text = ""
    with undone_when_ended():
        for result in _run(parts, device, folder):
            results.append(result)
            text = write_report(folder, about, results)  # after each part, for what comes may be the machine's last
    typer.echo(text)
    Console(stderr=True).print(f"{verdict(results)}; the report is in {folder}", soft_wrap=True, highlight=False, markup=False)
    if any(result.is_wrong for result in results):
        raise typer.Exit(1)


def _has_gpu() -> bool:
    import torch  # takes seconds

    return torch.cuda.is_available()


def _run(parts: Sequence[Part], device: Literal["cuda", "cpu"], folder: Path) -> Iterator[PartResult]:
    """Run the parts one after the other until one is interrupted, and show how far they are."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from certify.runner import run_part

    console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=len(parts))
        for part in parts:
            progress.update(task, description=part.name)
            result = run_part(part, device, folder)
            reason = f": {result.reason}" if result.reason else ""
            progress.console.print(f"{part.name:10} {result.status} in {result.seconds:.1f} s{reason}")
            progress.advance(task)
            yield result
            if result.status == "interrupted":
                return
