"""Measures on this machine: by which library a model's products are fastest, and how long its steps take.

    python -m engine.profiling.measure MODEL --threads N [--dtype D] [--quantization Q] [--kv-cache-dtype K] [--ranks R]
        [--anew]

A process of its own, so that whoever starts a cluster need not load torch. It writes the profile into the cache folder
(`configs.profiles`), unless there is one. Everything is tried on made-up weights of the model's shapes, so it takes some
seconds whatever the model's size. What else runs on the machine makes the times noisy, and noisy times decide nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from datetime import datetime
from itertools import cycle

import torch
from torch import Tensor

from configs.facts import KvCacheDtype, ModelFacts
from configs.models import resolve
from configs.profiles import MachineProfile, MeasuredProduct, ProfileKey, RowsChoice, read_or_measure
from configs.sharding import rank_facts
from engine.model_runner import DTYPES, DtypeName, resolve_dtype
from engine.models.packing import Quantization
from engine.native.build import Built, load_alike
from engine.native.library import NativeLibrary
from engine.profiling.choosing import choose, noisy, step_sizes
from engine.profiling.key import profile_key
from engine.profiling.products import HEAD, Product, products_of
from engine.profiling.steps import time_steps

ROWS = (1, 4, 16, 64, 256)
"""Numbers of rows that products are tried with."""
HEAD_ROWS = (1, 4, 16)
"""The same for the head, which is the largest product, and computed for sampled rows alone."""
_ROUNDS = 5
_TRIES = 2
"""Times that noisy rounds are made again, the first ones included."""
_SAMPLE_S, _MOST_CALLS = 0.0005, 20
"""Seconds that the calls of one round take together, and how many they are at most."""
_TOO_LONG_S = 0.1
"""Numbers of rows with which one product takes longer are not tried: the choice for fewer rows holds there."""
_REPEATED_S = 0.02
"""Products that take longer are not tried again where they were noisy."""
_WEIGHT_BYTES = 32_000_000
"""Bytes of the weights that a product goes through in turn, so that they come from where a model's would come from."""


def main() -> None:
    """Measure as the command line says, where nothing was measured yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--anew", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    facts = resolve(options.model, scaling_overridden=True).facts  # positions take as long with any scaling
    profile_here(
        facts,
        dtype=options.dtype,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        ranks=options.ranks,
        anew=options.anew,
    )


def profile_here(
    facts: ModelFacts,
    *,
    dtype: DtypeName,
    quantization: Quantization,
    kv_cache_dtype: KvCacheDtype = "auto",
    ranks: int = 1,
    anew: bool = False,
) -> tuple[MachineProfile, bool]:
    """Return the profile of this machine, for as many threads as torch has, and whether this process has measured it.

    It is read if there is one. To measure `anew` all libraries of the arithmetic are compiled first, if need be; otherwise
    those at hand are tried. Raises ConfigError for an unknown dtype, and if the cache folder can't be written.
    """
    torch_dtype = DTYPES[resolve_dtype(dtype)]
    alike = load_alike(torch_dtype, compile_missing=anew)  # before the key, which names the libraries at hand
    key = profile_key(
        facts,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        ranks=ranks,
        threads=torch.get_num_threads(),
    )
    return read_or_measure(key, lambda: measure(facts, key, torch_dtype, alike), anew=anew)


def measure(facts: ModelFacts, key: ProfileKey, dtype: torch.dtype, alike: Sequence[Built]) -> MachineProfile:
    """Measure for one rank of a model, with libraries of one arithmetic, the best by rule first.

    `facts` are those of the whole model. Nothing is measured without libraries.
    """
    found = MachineProfile(key=key, model=facts.name, measured_at=datetime.now().astimezone().isoformat(timespec="seconds"))
    if not alike:
        return found
    products = products_of(facts, dtype, key.quantization, key.ranks)
    with torch.inference_mode():
        measured = [measure_product(product, dtype, key.threads, alike) for product in products] if len(alike) > 1 else []
        library = NativeLibrary(alike[0], key.threads, dtype)
        library.prefer(measured, alike)
        times = time_steps(rank_facts(facts, key.ranks), products, library, key.kv_cache_dtype)
    found = found.model_copy(update={"products": tuple(measured)})
    if times is None:
        return found
    prefill, decode = times
    sizes = step_sizes({each.tokens: each.seconds for each in prefill if each.start == 0})
    return found.model_copy(update={"prefill": tuple(prefill), "decode": tuple(decode), "sizes": sizes})


def measure_product(product: Product, dtype: torch.dtype, threads: int, alike: Sequence[Built]) -> MeasuredProduct:
    """Time one product by all libraries, and choose one for each number of rows."""
    libraries = {built.instruction_set.name: NativeLibrary(built, threads, dtype) for built in alike}
    weights = [product.weight(dtype) for _ in range(max(1, _WEIGHT_BYTES // product.weight_bytes))]
    next_weight = cycle(weights)  # so that nobody finds in the processor's cache what another one has read just before

    def seconds(library: NativeLibrary, x_TI: Tensor, calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            product.multiply(library, x_TI, next(next_weight))
        return (time.perf_counter() - began) / calls

    def choice(rows: int) -> RowsChoice | None:
        x_TI = torch.ones(rows, product.inputs, dtype=dtype)
        warm_s = {name: seconds(library, x_TI, 1) for name, library in libraries.items()}
        if rows > 1 and max(warm_s.values()) > _TOO_LONG_S:
            return None
        calls = {name: max(1, min(_MOST_CALLS, int(_SAMPLE_S / warm_s[name]))) for name in libraries}
        rounds: dict[str, list[float]] = {}
        for _ in range(_TRIES if max(warm_s.values()) < _REPEATED_S else 1):
            made = [{name: seconds(library, x_TI, calls[name]) for name, library in libraries.items()} for _ in range(_ROUNDS)]
            rounds = {name: [each[name] for each in made] for name in libraries}
            if not noisy(rounds):
                break
        return choose(rows, rounds)

    choices: list[RowsChoice] = []
    for rows in HEAD_ROWS if product.name == HEAD else ROWS:
        if (chosen := choice(rows)) is None:
            break
        choices.append(chosen)
    return MeasuredProduct(
        name=product.name, bits=product.bits, inputs=product.inputs, outputs=product.outputs, choices=tuple(choices)
    )


if __name__ == "__main__":
    main()
