"""Settings for all tests."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

# A shell's background jobs ignore SIGINT, and so would every server that a test starts and ends by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# One of several processes of tests computes on one core, and so do the processes that it starts. Where a test wants two
# threads, one that waits for the other leaves its core to whoever has work: else the two take ten times as long. OpenMP reads
# these once.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
from hypothesis import HealthCheck, settings

# Triton reads this when it is imported. Without a GPU its kernels run in numpy; where there is one, the same tests run on it.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# A shared machine makes time limits on single examples a source of false alarms. CI repeats the same examples, so that a red
# run is about the change at hand; elsewhere every run looks at new ones.
settings.register_profile(
    "tandem", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=bool(os.environ.get("CI"))
)
settings.load_profile("tandem")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A slow test that would begin after `TANDEM_SLOW_TESTS_UNTIL` (seconds since 1970) is skipped: CI's machines differ in
    speed by four, and a run that is cut off says nothing of what it ran."""
    until = os.environ.get("TANDEM_SLOW_TESTS_UNTIL")
    if until is not None and time.time() > float(until) and item.get_closest_marker("slow"):
        pytest.skip("this run has no time left for slow tests")


@pytest.fixture(scope="session")
def transformers_smollm2() -> Any:
    """The default model in `transformers`, float32: read from the GGUF file with transformers' own code.

    Its `from_pretrained(gguf_file=...)` would do the same but wants the accelerate package.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    from configs.models import resolve

    path = resolve("smollm2").facts.weight_files[0]
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    left_over = model.load_state_dict(tensors, strict=False)
    assert (left_over.missing_keys, left_over.unexpected_keys) == (["lm_head.weight"], [])
    model.tie_weights()
    return model.eval()
