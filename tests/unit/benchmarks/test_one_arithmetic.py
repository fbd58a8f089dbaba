"""What the benchmark of one arithmetic compares: the same engine, whose products are oneDNN's where it says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from benchmarks.lib.environment import ROOT
from benchmarks.one_arithmetic import CHANGED, ONEDNN, OURS, systems, table
from benchmarks.pages.figures import EXTRACT

_MULTIPLIES = """
import json, torch
from engine.kernels.quantized import quantize
from engine.native.library import NativeLibrary
from engine.native.matrix import DenseMatrix, QuantizedMatrix
from engine.native.recording import Recording

torch.manual_seed(1)
library = NativeLibrary.load(1, torch.bfloat16)
weight, x = quantize(torch.randn(64, 96), 4), torch.randn(5, 96).bfloat16()
exact = x.double() @ weight.dequantize(torch.bfloat16).double().T
found = []
for matrix in QuantizedMatrix.of(weight, library), DenseMatrix.of(weight.dequantize(torch.bfloat16), library):
    recording = Recording()
    with library.recording(recording):
        y = matrix(x)
        logits = matrix.logits(x)
    y.zero_()
    recording.replay()
    found.append([
        "_by_onednn" in vars(matrix),
        (y.double() - exact).abs().max().item(),
        (logits.double() - exact).abs().max().item(),
        str(logits.dtype),
    ])
print(json.dumps(found))
"""


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 here")
@pytest.mark.parametrize("path", [str(ROOT), f"{CHANGED}:{ROOT}"], ids=[OURS, ONEDNN])
def test_products_are_onednn_s_where_that_is_asked_for(path: str) -> None:
    environment = {**os.environ, "PYTHONPATH": path}
    ran = subprocess.run([sys.executable, "-c", _MULTIPLIES], env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    for by_onednn, of_product, of_logits, dtype in json.loads(ran.stdout):
        assert by_onednn == (path != str(ROOT))
        assert of_product < 0.1, "values of up to thirty, in bfloat16"
        assert of_logits < 0.1
        assert dtype == "torch.float32"


def test_both_are_the_same_cluster() -> None:
    ours, other = systems()
    assert (ours.name, other.name) == (OURS, ONEDNN)
    assert ours.command == other.command


def test_the_figure_is_the_ratio() -> None:
    rounds = {
        name: [{"output_tokens_per_s": speed, "ttft_p50_ms": 1.0, "tpot_p50_ms": 2.0} for speed in speeds]
        for name, speeds in ((OURS, (90.0, 100.0, 110.0)), (ONEDNN, (100.0, 125.0, 100.0)))
    }
    result = {"rounds": rounds, "requests": 128, "load_average_before": 0.5}
    figures = EXTRACT["one_arithmetic"](result, "")
    assert [figure.value for figure in figures] == [100.0, 1.0]
    assert "0.90 (0.80 to 1.10) times as many" in table(result)
