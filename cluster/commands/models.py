"""`tandem models`: one row for each model that has a name or lies in the cache folder."""

from __future__ import annotations

from cluster.commands.lib.tables import print_models


def models() -> None:
    """List the models that can be served by name, and those in the cache."""
    from configs.models import list_models

    print_models(list_models())
