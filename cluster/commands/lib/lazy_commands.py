"""Commands that are imported when they are wanted, so that `tandem status` waits for nothing that only other commands need."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command


class LazyCommands(MutableMapping[str, Any]):
    """Typer's commands by name, each made when it is looked up first.

    The command `keep-gcs` is the function `keep_gcs` of the module `keep_gcs` in `package`, or a `typer.Typer` of this name.
    That of the path `workers/scale` is called `scale`, and its module is in the folder `workers`.
    """

    def __init__(self, package: str, paths: Sequence[str]) -> None:
        self._package = package
        self._modules = {path.rpartition("/")[2]: path.replace("/", ".").replace("-", "_") for path in paths}
        self._made: dict[str, Any] = dict.fromkeys(self._modules)

    def __getitem__(self, name: str) -> Any:
        if self._made[name] is None:
            self._made[name] = self._make(name)
        return self._made[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)

    def __contains__(self, name: object) -> bool:
        return name in self._made

    def _make(self, name: str) -> Any:
        module = importlib.import_module(f"{self._package}.{self._modules[name]}")
        found = getattr(module, name.replace("-", "_"))
        if isinstance(found, typer.Typer):
            return get_command(found)
        single = typer.Typer(add_completion=False)
        single.command(name)(found)
        return get_command(single)


def lazy_group(package: str, paths: Sequence[str]) -> type[TyperGroup]:
    """A class for `typer.Typer(cls=...)`: a group of the commands of these paths, whose modules are in `package`."""

    class Group(TyperGroup):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**attributes)
            self.commands = LazyCommands(package, paths)

    return Group
