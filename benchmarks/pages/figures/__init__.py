"""The headline figures of results: a function for each kind of result takes one to six of them out of its JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.pages.figure import Figure
from benchmarks.pages.figures import clusters, engines, others, servers

Extract = Callable[[Mapping[str, Any], str], Sequence[Figure]]
"""From a result's JSON, and the kind of processor that it is of (empty for results that are not by processor)."""

EXTRACT: dict[str, Extract] = {**servers.EXTRACT, **engines.EXTRACT, **clusters.EXTRACT, **others.EXTRACT}
"""By the name of the result in the catalogue."""
