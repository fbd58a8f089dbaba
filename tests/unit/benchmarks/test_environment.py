"""What result files say about the machine."""

from __future__ import annotations

import platform

from benchmarks.lib.environment import processor


def test_a_processor_is_told_by_its_name_and_by_what_decides_about_speed() -> None:
    first = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx avx2 bmi2\n\n"
    assert processor(first) == "AMD EPYC (avx2)"
    assert processor(first + first.replace("avx2", "avx2 avx512f")) == "AMD EPYC (avx2)", "all cores are like the first"
    assert (
        processor("model name: Xeon\nflags: avx512_bf16 amx_bf16 avx2 avx512f\n") == "Xeon (avx2/avx512f/avx512_bf16/amx_bf16)"
    )
    assert processor("") == platform.machine()
