"""The process of one part: `python -m certify.part_process MODULE DEVICE FINDINGS SCRATCH`."""

from __future__ import annotations

import faulthandler
import importlib
import signal
import sys
import tempfile
import traceback
from pathlib import Path

from certify.findings import Findings, PartSkipped


def main() -> None:
    """Run the function `run` of the module, and write what it finds into the file."""
    module, device, path, tempfile.tempdir = sys.argv[1:]  # temporary folders then go with the scratch folder
    faulthandler.enable()  # a crash then leaves its place in the log, and so does a hang that is ended
    faulthandler.register(signal.SIGTERM, chain=True)
    findings = Findings(Path(path))
    try:
        importlib.import_module(module).run(findings, device)
    except PartSkipped as skipped:
        findings.end(skipped=str(skipped))
    except Exception as error:  # noqa: BLE001 - whatever a part raises is its result
        traceback.print_exc()
        findings.end(error=f"{type(error).__name__}: {error}".strip().splitlines()[0])
    else:
        findings.end()


if __name__ == "__main__":
    main()
