"""The command `tandem`. Each command imports what it needs when it runs: `tandem status` waits for neither Ray nor torch.

Exit codes: 0 done; 1 a bug, with its traceback, or an audit that found something; 2 anything that the operator can mend (a
flag, a file, a port, a cluster that is not there), with one line on stderr that names it; 130 interrupted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster import __version__
from cluster.commands.bench import bench
from cluster.commands.keys import app as keys_app
from cluster.commands.plan import plan
from cluster.ray.gcs_guard import keep_gcs
from protocol.errors import ConfigError, TandemError

DEFAULT_URL = "http://127.0.0.1:8000"

app = typer.Typer(
    name="tandem",
    help="Serve language models with prefill and decode in separate pools of workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(keys_app, name="keys")
app.command()(bench)
app.command()(keep_gcs)
app.command()(plan)

Url = Annotated[str, typer.Option("--url", envvar="TANDEM_URL", help="Where the cluster answers.")]
AdminKey = Annotated[
    str | None, typer.Option("--admin-key", envvar="TANDEM_ADMIN_KEY", help="Key for /admin.", show_envvar=True)
]
ApiKey = Annotated[str | None, typer.Option("--api-key", envvar="TANDEM_API_KEY", help="Key for /v1.", show_envvar=True)]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--address", envvar="RAY_ADDRESS", help="Ray cluster to join (host:port, or auto); otherwise Ray is started here."
    ),
]


def main() -> None:
    """Entry point of the command."""
    try:
        code = app(standalone_mode=False)
    except (TandemError, typer.TyperException) as error:
        # Without arguments, the help has been printed and the error says nothing.
        if text := _one_line(error):
            print(f"tandem: {text}", file=sys.stderr)  # noqa: T201
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    sys.exit(code)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tandem {__version__}")
        raise typer.Exit()


@app.callback()
def tandem(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that stand before a command. What they do happens while they are read."""


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option(help="YAML file; flags go before what it says.")] = None,
    model: Annotated[str | None, typer.Option(help="smollm2, a GGUF file, a Hugging Face directory or a hub id.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name of the model in the API.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    prefill: Annotated[int | None, typer.Option(help="Number of prefill workers.")] = None,
    decode: Annotated[int | None, typer.Option(help="Number of decode workers.")] = None,
    colocated: Annotated[
        bool | None, typer.Option("--colocated", help="Decode workers compute prompts too, and there are no others.")
    ] = None,
    disaggregation: Annotated[str | None, typer.Option(help="always, auto (per request) or never (as --colocated).")] = None,
    tensor_parallel_size: Annotated[int | None, typer.Option(help="Ranks that compute one worker's model together.")] = None,
    prefill_tensor_parallel_size: Annotated[int | None, typer.Option(help="The same for prefill workers alone.")] = None,
    decode_tensor_parallel_size: Annotated[int | None, typer.Option(help="The same for decode workers alone.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    gpu_memory_utilization: Annotated[float | None, typer.Option(help="Of a GPU, for weights and KV.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16 (GPUs).")] = None,
    quantization: Annotated[str | None, typer.Option(help="auto (as the file is), none, int8 or int4.")] = None,
    deterministic: Annotated[
        bool | None, typer.Option("--deterministic", help="Tokens do not depend on what runs beside a request.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of prompt and answer together.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens per KV block: 8, 16, 32 or 64.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences per decode step.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Prompt tokens per step, of either role.")] = None,
    admin_key: AdminKey = None,
    keys_file: Annotated[Path | None, typer.Option(help="API keys, as `tandem keys` makes them.")] = None,
    allow_anonymous: Annotated[
        bool | None, typer.Option("--allow-anonymous", help="Serve other machines without asking for keys.")
    ] = None,
    address: RayAddress = None,
) -> None:
    """Start a cluster and serve it until Ctrl-C."""
    from cluster.commands.serve import serve_until_interrupted
    from configs.loader import load_config

    flags: dict[str, Any] = {
        "model": model,
        "served_model_name": served_model_name,
        "http.host": host,
        "http.port": port,
        "prefill.workers": prefill,
        "decode.workers": decode,
        "prefill.tensor_parallel_size": prefill_tensor_parallel_size or tensor_parallel_size,
        "decode.tensor_parallel_size": decode_tensor_parallel_size or tensor_parallel_size,
        "disaggregation": "never" if colocated else disaggregation,
        "device": device,
        "gpu_memory_utilization": gpu_memory_utilization,
        "dtype": dtype,
        "quantization": quantization,
        "deterministic": deterministic,
        "max_model_len": max_model_len,
        "block_size": block_size,
        "decode.max_batch_size": max_num_seqs,
        "prefill.max_batch_tokens": max_num_batched_tokens,
        "decode.max_chunk_tokens": max_num_batched_tokens,
        "http.admin_key": admin_key,
        "http.keys_file": None if keys_file is None else str(keys_file),
        "http.allow_anonymous": allow_anonymous,
    }
    if colocated and disaggregation not in (None, "never"):
        raise ConfigError(f"--colocated means never, not {disaggregation}", param="disaggregation")
    overrides = {key: value for key, value in flags.items() if value is not None}
    serve_until_interrupted(load_config(config, overrides), address)


@app.command()
def stop(address: RayAddress = None) -> None:
    """End the cluster on a Ray cluster (a local `tandem serve` ends with Ctrl-C)."""
    if address is None:
        raise ConfigError("name the Ray cluster with --address or RAY_ADDRESS", param="address")
    from cluster.ray.session import joined_ray

    with joined_ray(address):
        from cluster.teardown import remove_cluster

        found = remove_cluster()
    typer.echo("stopped" if found else "no Tandem cluster runs there")


@app.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help="The API's answer as it is.")] = False,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
) -> None:
    """Show the workers: state, load, KV cache."""
    from cluster.commands.http_client import ApiClient
    from cluster.commands.status_table import print_status

    answer = ApiClient(url, admin_key).get("/admin/status")
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    else:
        print_status(answer)


@app.command()
def scale(
    sizes: Annotated[list[str], typer.Argument(metavar="ROLE=WORKERS...", help="For example: prefill=2 decode=3")],
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    wait_s: Annotated[float, typer.Option("--wait", help="Seconds to wait until it is done; 0 returns at once.")] = 600.0,
) -> None:
    """Change the number of workers while requests run; running streams move to the workers that stay."""
    from cluster.commands.http_client import ApiClient
    from cluster.commands.scale import parse_sizes, wait_until_scaled

    wanted = parse_sizes(sizes)
    client = ApiClient(url, admin_key)
    client.post("/admin/scale", {role.value: workers for role, workers in wanted.items()})
    if wait_s > 0:
        wait_until_scaled(client, wanted, wait_s)


@app.command()
def drain(
    worker: Annotated[str, typer.Argument(help="Its id, as `tandem status` shows it.")],
    restart: Annotated[bool, typer.Option("--restart", help="Start it anew instead of having one worker less.")] = False,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    wait_s: Annotated[float, typer.Option("--wait", help="Seconds to wait until it is done; 0 returns at once.")] = 660.0,
) -> None:
    """Empty a worker while requests run, and end it: running streams move to other workers."""
    from cluster.commands.drain import drain_and_wait
    from cluster.commands.http_client import ApiClient

    drain_and_wait(ApiClient(url, admin_key), worker, restart, wait_s)


@app.command()
def rollout(
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    room_s: Annotated[
        float, typer.Option("--room", help="Seconds to wait for one worker more of each role; 0 does without.")
    ] = 120.0,
    wait_s: Annotated[float, typer.Option("--wait", help="Seconds that one worker may take to drain and to start.")] = 780.0,
) -> None:
    """Restart all workers, one after the other, while requests run."""
    from cluster.commands.drain import roll_out
    from cluster.commands.http_client import ApiClient

    roll_out(ApiClient(url, admin_key), room_s, wait_s)


@app.command()
def audit(
    as_json: Annotated[bool, typer.Option("--json", help="The API's answer as it is.")] = False,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
) -> None:
    """Compare the books of all workers: nothing, or a line for each leak and exit code 1."""
    from cluster.commands.http_client import ApiClient

    answer = ApiClient(url, admin_key).get("/admin/audit")
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    else:
        for leak in answer["leaks"]:
            typer.echo(leak["message"])
    if answer["leaks"]:
        raise typer.Exit(1)


@app.command()
def models() -> None:
    """List the models that can be served by name, and those in the cache."""
    from cluster.commands.status_table import print_models
    from configs.models import list_models

    print_models(list_models())


@app.command()
def chat(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    model: Annotated[str | None, typer.Option(help="The cluster's own if not given.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 always takes the likeliest token.")] = None,
) -> None:
    """Talk to the model in the terminal."""
    from rich.console import Console

    from cluster.commands.chat import Conversation
    from cluster.commands.chat import chat as talk
    from cluster.commands.http_client import ApiClient

    client = ApiClient(url, api_key)
    name = model or client.get("/v1/models")["data"][0]["id"]
    talk(client, Conversation(name, system, max_tokens, temperature), Console())


def _one_line(error: TandemError | typer.TyperException) -> str:
    text = error.message if isinstance(error, TandemError) else error.format_message()
    return " ".join(text.split())
