"""Two ranks of a worker over NCCL: whole models with their collectives inside of CUDA graphs, and sums to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from certify.findings import Content, Findings
from certify.parts import ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_two_ranks_say_what_one_says(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    ranks.run(Findings(found), "cuda")
    checks = Content.read(found).checks
    assert len(checks) == 4
    assert [check for check in checks if not check.passed] == []
