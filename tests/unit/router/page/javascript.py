"""Runs the pages' own modules in Node, where it is installed, without a page."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from router.page import routes

NODE = shutil.which("node")
FOLDER = Path(routes.__file__).parent
_DEADLINE_S = 60.0
_PROGRAM = """
import {{ readFileSync }} from "node:fs";
const {{ modules, given }} = JSON.parse(readFileSync(0, "utf8"));
const imported = await Promise.all(modules.map((each) => import(each)));
console.log(JSON.stringify(await ({function})(Object.assign({{}}, ...imported), given)));
"""


def run_script(function: str, given: Any, *modules: str) -> Any:
    """The result of a JavaScript function, maybe an async one, called with what these files export and with `given`."""
    assert NODE is not None
    command = [NODE, "--input-type=module", "--eval", _PROGRAM.format(function=function)]
    text = json.dumps({"modules": [(FOLDER / name).as_uri() for name in modules], "given": given})
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
