"""The parts of `tandem certify`: each module has a function `run(findings, device)` and runs in a process of its own."""
