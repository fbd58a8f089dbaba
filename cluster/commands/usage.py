"""`tandem usage`: what tenants have used, by the usage log. No cluster has to run, and one may be writing it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protocol.errors import ConfigError

if TYPE_CHECKING:
    from configs.schema import ClusterConfig
    from telemetry.usage.reading import UsageSums, Wanted

_MONTH = r"[0-9]{4}-(0[1-9]|1[0-2])"


def usage(
    log: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The usage log; otherwise the one that --config names.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="This tenant alone.")] = None,
    key: Annotated[str | None, typer.Option(metavar="ID", help="This key alone, as `tandem keys list` shows it.")] = None,
    month: Annotated[str | None, typer.Option(metavar="YYYY-MM", help="This calendar month alone, in UTC.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    config: Annotated[Path | None, typer.Option(help="The cluster's YAML file: its log, and the budgets of a --month.")] = None,
) -> None:
    """Sum up the usage log by tenant, key and model. Rotated files that are kept count too."""
    from configs.loader import load_config
    from telemetry.usage.reading import Wanted, sum_usage

    _check_month(month)
    loaded = load_config(config, {} if log is None else {"telemetry.usage_log": str(log)})
    if loaded.telemetry.usage_log is None:
        raise ConfigError(
            "name the usage log, or with --config a file that has telemetry.usage_log", param="telemetry.usage_log"
        )
    wanted = Wanted(tenant, key, month)
    sums = sum_usage(Path(loaded.telemetry.usage_log), wanted)
    budgets = list(_budgets(loaded, sums, wanted))
    if as_json:
        typer.echo(json.dumps(_as_json(sums, budgets), indent=2))
    else:
        _print(sums, budgets)


def _check_month(month: str | None) -> None:
    if month is not None and re.fullmatch(_MONTH, month) is None:
        raise ConfigError(f"--month is a year and a month, such as 2026-11; got {month!r:.40}", param="month")


def _budgets(config: ClusterConfig, sums: UsageSums, wanted: Wanted) -> Iterator[tuple[str, int, int]]:
    """Whose each budget is, its tokens, and how many of them are used. Budgets of which nothing is used are left out.

    Of a key that is wanted there is its own alone: its tenant's budget is used by other keys, too.
    """
    from router.access.keys import read_key_file

    keys = {} if config.http.keys_file is None or not sums.budgets else read_key_file(Path(config.http.keys_file)).keys
    for name, used in sorted(sums.budgets.items()):
        if name.startswith("tier/"):
            _, tenant, tier = name.split("/", 2)
            budget = config.tiers[tier].tokens_per_month if tier in config.tiers else None
            whose, is_wanted = f"{tenant or 'clients without a key'} in tier {tier}", wanted.key is None
        elif name in keys:
            tenant, budget = keys[name].tenant, keys[name].tokens_per_month
            whose, is_wanted = f"key {name}", wanted.key in (None, name)
        else:
            continue
        if budget is not None and is_wanted and wanted.tenant in (None, tenant):
            yield whose, budget, used


def _as_json(sums: UsageSums, budgets: list[tuple[str, int, int]]) -> dict[str, object]:
    rows = [{"tenant": tenant, "key": key, "model": model} | asdict(row) for (tenant, key, model), row in sums.sorted_rows()]
    return {
        "since": sums.since,
        "rows": rows,
        "total": asdict(sums.total()),
        "budgets": [{"of": whose, "tokens": tokens, "used": used} for whose, tokens, used in budgets],
        "unreadable_lines": sums.num_bad,
    }


def _print(sums: UsageSums, budgets: list[tuple[str, int, int]]) -> None:
    from cluster.commands.lib.tables import print_usage

    print_usage(sums)
    for whose, tokens, used in budgets:
        typer.echo(f"{whose}: {used} of {tokens} tokens ({used / tokens:.0%})")
    if sums.num_bad:
        typer.echo(f"{sums.num_bad} lines can't be read", err=True)
