"""`tandem keys`: the API keys of a cluster. They are in a file (http.keys_file), so no cluster has to run.

Every router reads the file again when it has changed.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protocol.errors import ConfigError

if TYPE_CHECKING:
    from configs.schema import ClusterConfig
    from router.access.keys import ApiKey

keys = typer.Typer(name="keys", help="Add, list and revoke API keys.", no_args_is_help=True, add_completion=False)

KeysFile = Annotated[
    Path | None, typer.Option("--keys-file", envvar="TANDEM_KEYS_FILE", help="The file; otherwise the one that --config names.")
]
Config = Annotated[Path | None, typer.Option("--config", help="The cluster's YAML file: its http.keys_file and its tiers.")]


AuditLog = Annotated[
    Path | None, typer.Option("--audit-log", help="The audit log to note it in; otherwise the one that --config names.")
]


@keys.command()
def add(
    tenant: Annotated[str, typer.Option(help="Whose key it is; tenants share no cached prefixes.")],
    tier: Annotated[str, typer.Option(help="One of the tiers of the configuration.")] = "standard",
    requests_per_minute: Annotated[int | None, typer.Option(help="No limit if not given.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(help="Prompts and answers; no limit if not given.")] = None,
    tokens_per_month: Annotated[
        int | None, typer.Option(help="The same of a calendar month, in UTC; the cluster needs a usage log.")
    ] = None,
    max_running_requests: Annotated[int | None, typer.Option(help="Answers under way at a time, at each router.")] = None,
    max_context: Annotated[int | None, typer.Option(help="Tokens of prompt and answer of one request.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="A model that it is for (again for more); otherwise all.")] = None,
    expires: Annotated[
        datetime | None, typer.Option(formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"], help="When it ends, in UTC; otherwise never.")
    ] = None,
    keys_file: KeysFile = None,
    config: Config = None,
    audit_log: AuditLog = None,
) -> None:
    """Make a key and print it. It is shown this once: the file has only a hash of it."""
    from cluster.commands.lib.key_file import add_key

    loaded = _config(keys_file, config, audit_log)
    path, tiers = _file(loaded), loaded.tiers
    if tier not in tiers:
        raise ConfigError(f"there is no tier {tier!r}; the configuration has {', '.join(tiers)}", param="tier")
    if "" in (model or ()):
        raise ConfigError("model: name one, or leave --model out for all", param="model")
    ends = None if expires is None else expires.replace(tzinfo=UTC)
    if ends is not None and ends <= datetime.now(UTC):
        raise ConfigError(f"expires: {ends:%Y-%m-%d %H:%M:%S} UTC is over", param="expires")
    values = {
        "tenant": tenant,
        "tier": tier,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "tokens_per_month": tokens_per_month,
        "max_running_requests": max_running_requests,
        "max_context": max_context,
        "models": tuple(model) if model else None,
        "expires": ends,
    }
    note = _auditor(loaded)
    typer.echo(add_key(path, values, lambda key_id: note("key_added", key=key_id, tenant=tenant, tier=tier)))


@keys.command("list")
def show(keys_file: KeysFile = None, config: Config = None) -> None:
    """Show all keys, without their secrets."""
    from rich.markup import escape
    from rich.table import Table

    from cluster.commands.lib.tables import table_console
    from router.access.keys import read_key_file

    path = _file(_config(keys_file, config))
    table = Table(box=None, pad_edge=False)
    table.add_column("id", no_wrap=True)  # to be copied
    for title in (
        "tenant",
        "tier",
        "requests/min",
        "tokens/min",
        "tokens/month",
        "running",
        "context",
        "models",
        "state",
    ):
        table.add_column(title, overflow="fold")
    file = read_key_file(path)
    for key_id, key in sorted(file.keys.items(), key=lambda item: (item[1].tenant, item[1].created)):
        limits = [
            key.requests_per_minute,
            key.tokens_per_minute,
            key.tokens_per_month,
            key.max_running_requests,
            key.max_context,
        ]
        cells = ["-" if limit is None else str(limit) for limit in limits]
        row = [key_id, key.tenant, key.tier, *cells, ", ".join(key.models or ["all"]), _state(key)]
        table.add_row(*map(escape, row))
    for key_id, problem in sorted(file.skipped.items()):
        table.add_row(escape(key_id), *["-"] * 8, escape(f"refused, the entry is wrong: {problem}"))
    table_console().print(table)


@keys.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="As `tandem keys list` shows it.")],
    keys_file: KeysFile = None,
    config: Config = None,
    audit_log: AuditLog = None,
) -> None:
    """Refuse a key from now on. Requests that run already go on."""
    from cluster.commands.lib.key_file import revoke_key

    loaded = _config(keys_file, config, audit_log)
    path, note = _file(loaded), _auditor(loaded)
    revoke_key(path, key_id, lambda key_id: note("key_revoked", key=key_id))
    typer.echo(f"{key_id} is revoked")


def _config(keys_file: Path | None, config: Path | None, audit_log: Path | None = None) -> ClusterConfig:
    from configs.loader import load_config

    given = {"http.keys_file": keys_file, "telemetry.audit_log": audit_log}
    return load_config(config, {key: str(path) for key, path in given.items() if path is not None})


def _file(config: ClusterConfig) -> Path:
    if config.http.keys_file is None:
        raise ConfigError(
            "name the file with --keys-file, or with --config one that has http.keys_file", param="http.keys_file"
        )
    return Path(config.http.keys_file)


def _auditor(config: ClusterConfig) -> Callable[..., None]:
    """Return what notes a change of keys in the audit log, if there is one: `note(event, key=...)`.

    Raises ConfigError if the log can't be written, and so does the note: nothing is changed that would not be noted.
    """
    from telemetry.audit_file import AuditFile, audit_line

    if config.telemetry.audit_log is None:
        return lambda event, **values: None
    file = AuditFile(Path(config.telemetry.audit_log))
    file.check()
    return lambda event, **values: file.append([audit_line(event, who="operator", user=_user(), **values)])


def _user() -> str:
    """The name of this user, or the number of one without a name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _state(key: ApiKey) -> str:
    if key.revoked is not None:
        return f"revoked {key.revoked.astimezone(UTC):%Y-%m-%d %H:%M}"
    if key.expires is None:
        return "good"
    when = f"{key.expires.astimezone(UTC):%Y-%m-%d %H:%M}"
    return f"good until {when}" if key.expires > datetime.now(UTC) else f"expired {when}"
