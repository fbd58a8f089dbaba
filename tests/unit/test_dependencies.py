"""The table of imports in docs/architecture.md, read from the code and enforced."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEAVES = {"protocol", "configs", "telemetry"}
ALLOWED: dict[str, set[str]] = {
    "cluster": {
        "autoscaler",
        "certify",
        "router",
        "prefill_workers",
        "decode_workers",
        "worker",
        "kv_transfer",
        "engine",
        "loadtest",
        "simulator",
        *LEAVES,
    },
    "router": LEAVES,
    "autoscaler": LEAVES,
    "prefill_workers": {"worker", "engine", "kv_transfer", *LEAVES},
    "decode_workers": {"worker", "engine", "kv_transfer", *LEAVES},
    "worker": {"engine", "kv_transfer", *LEAVES},
    "kv_transfer": {"engine.kernels", "engine.ranks.store", *LEAVES},
    "engine": LEAVES,
    "configs": {"protocol.errors"},
    "protocol": set(),
    "telemetry": {"protocol"},
    "loadtest": {"protocol.errors"},
    "certify": {"engine", "kv_transfer", "loadtest", *LEAVES},
    "simulator": {
        "autoscaler",
        "router.rules",
        "prefill_workers.scheduler",
        "decode_workers.ledger",
        "decode_workers.scheduler",
        "decode_workers.stream",
        "decode_workers.ticket_entry",
        "engine.batch",
        "engine.memory.prefix_cache",
        "loadtest",
        *LEAVES,
    },
}
ROOMS = (
    {"app"},
    {"endpoints"},
    {"service"},
    {"resume", "access"},
    {"api", "page"},
    {"request"},
    {"text", "dispatch"},
    {"rules"},
)
"""The rooms of the router, from top to bottom. A room may import those below it, never one beside or above it."""
NO_TORCH = {"autoscaler", "router", "configs", "protocol", "telemetry", "loadtest"}


def imports(path: Path) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports name their package"
            found.append((node.lineno, node.module or ""))
    return found


def within(module: str, allowed: set[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_follow_the_table(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"{package} is empty"
    for path in files:
        for line, module in imports(path):
            where = f"{path.relative_to(ROOT)}:{line} imports {module}"
            if module.split(".")[0] in ALLOWED:
                assert within(module, ALLOWED[package] | {package}), where
            if package in NO_TORCH:
                assert module.split(".")[0] != "torch", where
            if package != "cluster":
                assert module.split(".")[0] != "ray", f"{where}: Ray is known to cluster alone"


def room_of(path: Path) -> str:
    """The folder of a module within router/, or the name of a module that stands there alone."""
    return path.relative_to(ROOT / "router").parts[0].removesuffix(".py")


def test_arrows_between_the_rooms_of_the_router_go_down() -> None:
    levels = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
    files = [path for path in sorted((ROOT / "router").rglob("*.py")) if path != ROOT / "router" / "__init__.py"]
    assert {room_of(path) for path in files} == levels.keys(), "every file has a room, and no room is empty"
    for path in files:
        room = room_of(path)
        for line, module in imports(path):
            if module.split(".")[0] == "router":
                other = module.split(".")[1]
                assert other == room or levels[other] > levels[room], f"{path.relative_to(ROOT)}:{line} imports {module}"


def test_rules_are_pure() -> None:
    """They decide; whoever calls them has the clock, the tasks and the connections."""
    impure = {"asyncio", "threading", "concurrent", "socket", "time", "logging", "random", "telemetry"}
    rooms = (ROOT / "router" / "rules", ROOT / "decode_workers" / "rules", ROOT / "decode_workers" / "speculation")
    for path in (path for room in rooms for path in room.rglob("*.py")):
        for line, module in imports(path):
            assert not within(module, impure), f"{path.relative_to(ROOT)}:{line} imports {module}"


def test_no_pickle() -> None:
    for package in ALLOWED:
        for path in (ROOT / package).rglob("*.py"):
            assert not any(within(module, {"pickle", "cloudpickle", "marshal", "shelve"}) for _, module in imports(path)), path


def test_every_package_is_listed_for_installation() -> None:
    import tomllib

    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {
        ".".join(path.parent.relative_to(ROOT).parts) for package in ALLOWED for path in (ROOT / package).rglob("__init__.py")
    }
    assert listed == found


def test_kernels_stand_alone() -> None:
    """kv_transfer may import engine.kernels, so these must not bring the rest of the engine along."""
    for path in (ROOT / "engine" / "kernels").rglob("*.py"):
        for line, module in imports(path):
            assert not within(module, {"engine"}) or within(module, {"engine.kernels"}), f"{path}:{line} imports {module}"
