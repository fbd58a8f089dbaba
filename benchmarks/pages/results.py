"""The committed results, each with the part of the catalogue that it belongs to, and the commits that it was measured at."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.environment import RESULTS
from benchmarks.pages.figure import Figure
from benchmarks.pages.figures import EXTRACT, servers
from benchmarks.suite.catalogue import PARTS
from benchmarks.suite.part import Part

KINDS = {"avx512_bf16": "AMD with AVX-512", "amx": "Intel with AMX"}
"""The kinds of processor that count: each result by processor should have both."""
OTHER_KINDS = {"avx512": "Intel with AVX-512, without AMX", "avx2": "any with AVX2", "torch": "any, by torch's operators"}
KIND_NAMES = {**KINDS, **OTHER_KINDS}
_FEATURES = re.compile(r" \([a-z0-9_/]+\)")


@dataclass(frozen=True)
class Result:
    """One result file."""

    name: str
    part: Part
    kind: str
    """The operators of the processor; empty for results that are not by processor."""
    data: Mapping[str, Any]

    @property
    def figures(self) -> Sequence[Figure]:
        """The headline figures."""
        return EXTRACT[self.part.result](self.data, self.kind)

    @property
    def commits(self) -> list[str]:
        """The commits that its figures are of, as the result names them, `+changes` included."""
        parts = [entry["environment"]["commit"] for entry in servers.shown_entries(self.data)]
        return sorted(set(parts)) or [self.data["environment"]["commit"]]

    @property
    def machine(self) -> str:
        """Processor and cores, without the processor's features."""
        return _FEATURES.sub("", self.hardware)

    @property
    def hardware(self) -> str:
        """Processor and cores."""
        environment = self.data["environment"]
        cores = f", {environment['cores']} cores" if "cores" in environment else ""
        gpu = self.name.rpartition("_")[2].upper()
        return f"{environment.get('processor', f'one {gpu}')}{cores}"


def read_results(folder: Path = RESULTS) -> list[Result]:
    """Return all results in the order of the catalogue. Raises ValueError for a file that belongs to no part."""
    found = [_read(file) for file in sorted(folder.glob("*.json"))]
    order = {part.name: number for number, part in enumerate(PARTS)}
    kinds = ["", *KINDS, *OTHER_KINDS]
    return sorted(found, key=lambda result: (order[result.part.name], kinds.index(result.kind), result.name))


def _read(file: Path) -> Result:
    part, kind = owner(file.stem)
    return Result(file.stem, part, kind, json.loads(file.read_text()))


def owner(name: str) -> tuple[Part, str]:
    """Return the part that a result of this name belongs to, and its kind of processor. Raises ValueError if there is none."""
    for part in PARTS:
        for kind in (*KINDS, *OTHER_KINDS) if part.per_processor else ():
            if name == f"{part.result}_{kind}":
                return part, kind
        if not part.per_processor and (name == part.result or (part.module is None and name.startswith(f"{part.result}_"))):
            return part, ""
    raise ValueError(f"benchmarks/results/{name}.json belongs to no part of benchmarks/suite/catalogue.py")
