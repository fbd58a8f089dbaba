"""`tandem profile`: measures what is fastest on this machine for a model, and shows it.

Workers read the result when they start, and so does `tandem plan`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cluster.commands.lib.config_flags import ConfigFlag, ConfigFlags
from cluster.commands.lib.flag_groups import expand_flags

_FLAGS = (
    ConfigFlag("--model", "model", help="smollm2, a GGUF file, a Hugging Face directory or a hub id."),
    ConfigFlag("--threads", "prefill.threads", "decode.threads", help="Cores per worker; by default as workers share them."),
    ConfigFlag("--dtype", "dtype", help="auto, float32 or bfloat16."),
    ConfigFlag("--quantization", "quantization", help="auto (as the file is), none, int8 or int4."),
    ConfigFlag("--kv-cache-dtype", "kv_cache_dtype", help="auto (as it is computed) or int8."),
    ConfigFlag("--colocated", "disaggregation", sets="never", help="Workers of a cluster of decode workers alone."),
)


@expand_flags
def profile(
    *,
    config: Annotated[Path | None, typer.Option(help="YAML file of the cluster; flags go before what it says.")] = None,
    overrides: Annotated[dict[str, Any], ConfigFlags(_FLAGS)],
    show: Annotated[bool, typer.Option("--show", help="Show what was measured before, and measure nothing.")] = False,
    save: Annotated[Path | None, typer.Option(help="Write a profile for `tandem serve --engine paced`.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one profile for each number of threads.")] = False,
) -> None:
    """Measure anew what is fastest on this machine for a model, and show it.

    Workers read the result when they start, and so does `tandem plan`. It takes some seconds, in which nothing else should
    compute.
    """
    from cluster.checks import check_model
    from cluster.commands.lib.profile_tables import print_profile
    from cluster.measured import known_profiles, measured_profiles
    from cluster.paced import machine_profile, save_profile
    from configs.loader import load_config
    from configs.profiles import can_be_kept, profiles_folder
    from protocol.errors import UnavailableError

    cluster = load_config(config, overrides)
    facts = check_model(cluster)
    if show:
        found = known_profiles(cluster, facts)
    else:
        with Console(stderr=True).status("measuring"):
            found = measured_profiles(cluster, facts, anew=True)
    if not found:
        hint = "nothing was measured yet; leave out --show" if show else "measuring failed"
        if not show and not can_be_kept():
            hint = f"{profiles_folder()} can't be written; set TANDEM_CACHE to a folder that can"
        raise UnavailableError(f"no profile of {facts.name} on this machine: {hint}")
    if save is not None:
        save_profile(machine_profile(cluster, facts, found), save)
    different = list({each.key.model_dump_json(): each for each in found.values()}.values())
    if as_json:
        typer.echo(f"[{','.join(each.model_dump_json() for each in different)}]")
        return
    for each in different:
        print_profile(each)
