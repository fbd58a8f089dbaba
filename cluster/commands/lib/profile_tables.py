"""Tables for `tandem profile`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from configs.profiles import MachineProfile, MeasuredProduct


def print_profile(profile: MachineProfile) -> None:
    """Print what was measured: a table of products, one of steps, and the sizes of steps that follow."""
    console = Console(soft_wrap=True, highlight=False, emoji=False)
    key = profile.key
    kv = "" if key.kv_cache_dtype == "auto" else f", KV in {key.kv_cache_dtype}"
    of = f"{profile.model}, {key.dtype} {key.quantization}{kv}" + (f", {key.ranks} ranks" if key.ranks > 1 else "")
    threads = "1 thread" if key.threads == 1 else f"{key.threads} threads"
    console.print(f"{of}: {threads} on {key.processor}, measured {profile.measured_at}", markup=False)
    if profile.products:
        console.print(_products(profile.products))
    else:
        console.print("no two libraries to choose from: products are computed by the one that the processor has")
    if profile.sizes is None:
        console.print("no step times: without native operators, or too noisy; the shipped sizes of steps hold")
        return
    console.print(_steps(profile))
    sizes = profile.sizes
    console.print(f"prefill.max_batch_tokens {sizes.max_batch_tokens}, prefill.saturation_tokens {sizes.saturation_tokens}")
    console.print(f"decode.max_chunk_tokens {sizes.max_chunk_tokens}")


def _products(products: tuple[MeasuredProduct, ...]) -> Table:
    """A row for each number of rows, with the times of all libraries in the order of the rule."""
    libraries = list(products[0].choices[0].seconds)
    times = (f"{name}, ms" for name in libraries)
    table = Table("product", "bits", "shape", "rows", *times, "chosen", "GFLOP/s", box=None, pad_edge=False)
    for product in products:
        for number, choice in enumerate(product.choices):
            about = (product.name, str(product.bits), f"{product.inputs}x{product.outputs}")
            seconds = (f"{choice.seconds[name] * 1e3:.3f}" for name in libraries)
            operations = 2 * choice.rows * product.inputs * product.outputs
            chosen = f"{choice.library} (noisy)" if choice.noisy else choice.library
            speed = f"{operations / choice.seconds[choice.library] / 1e9:.0f}"
            table.add_row(*(("", "", "") if number else about), str(choice.rows), *seconds, chosen, speed)
    return table


def _steps(profile: MachineProfile) -> Table:
    table = Table("step", "ms", "tokens/s", box=None, pad_edge=False)
    for chunk in profile.prefill:
        name = f"{chunk.tokens} prompt tokens" + (f" behind {chunk.start}" if chunk.start else "")
        table.add_row(name, f"{chunk.seconds * 1e3:.1f}", f"{chunk.tokens / chunk.seconds:.0f}")
    for step in profile.decode:
        name = f"{step.batch} streams of {step.context} tokens"
        table.add_row(name, f"{step.seconds * 1e3:.1f}", f"{step.batch / step.seconds:.0f}")
    return table
