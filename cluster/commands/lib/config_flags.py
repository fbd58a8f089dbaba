"""The flags of `tandem serve` that set keys of the configuration: a table with one line for each flag.

A flag has the type of its key's field in `configs.schema`, which also checks the value. A flag that is not given leaves its key
to the YAML file, or to the field's default.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from cluster.commands.lib.flag_groups import flag
from configs.schema import ClusterConfig, LocalPath
from protocol.errors import ConfigError


class ConfigFlag:
    """One flag: its name, the keys of the configuration that it sets, its help.

    Where several flags set the same key, the last one in the table that is given goes before the others. A flag with `sets` is
    a switch that gives its keys this value. `envvar` names the environment variable that is read where the flag is not given.
    """

    def __init__(self, name: str, *keys: str, help: str, sets: Any = None, envvar: str | None = None) -> None:
        self.name = name.removeprefix("--").replace("-", "_")
        self.keys = keys
        self.sets = sets
        self.help = help
        self.envvar = envvar

    def parameter(self) -> inspect.Parameter:
        """The parameter that Typer makes this flag of; None means that the flag was not given."""
        kind: Any = bool if self.sets is not None else _kind(self.keys[0])
        names = (f"--{self.name.replace('_', '-')}",) if kind is bool else ()  # so that there is no --no-NAME beside it
        return flag(self.name, Annotated[kind | None, typer.Option(*names, help=self.help, envvar=self.envvar)], None)


FLAGS = (
    ConfigFlag("--model", "model", help="smollm2, a GGUF file, a Hugging Face directory or a hub id."),
    ConfigFlag("--served-model-name", "served_model_name", help="Name of the model in the API."),
    ConfigFlag("--host", "http.host", help="Address to listen on."),
    ConfigFlag("--port", "http.port", help="Port to listen on."),
    ConfigFlag("--prefill", "prefill.workers", help="Number of prefill workers."),
    ConfigFlag("--decode", "decode.workers", help="Number of decode workers."),
    ConfigFlag("--autoscale", "autoscale.sizes", help="Pools that size themselves: prefill=1..3,decode=0..4."),
    ConfigFlag("--slo", "autoscale.slo", help="What they size themselves for, in ms: ttft:500,tpot:50."),
    ConfigFlag("--standby", "autoscale.standby", help="Workers that are up and wait to be wanted."),
    ConfigFlag(
        "--colocated", "disaggregation", sets="never", help="Decode workers compute prompts too, and there are no others."
    ),
    ConfigFlag("--disaggregation", "disaggregation", help="always, auto (per request) or never (as --colocated)."),
    ConfigFlag("--routing", "routing", help="By what workers are chosen: cache and load, or load alone."),
    ConfigFlag(
        "--tensor-parallel-size",
        *("prefill.tensor_parallel_size", "decode.tensor_parallel_size"),
        help="Ranks that compute one worker's model together.",
    ),
    ConfigFlag("--prefill-tensor-parallel-size", "prefill.tensor_parallel_size", help="The same for prefill workers alone."),
    ConfigFlag("--decode-tensor-parallel-size", "decode.tensor_parallel_size", help="The same for decode workers alone."),
    ConfigFlag("--engine", "engine", help="model, or paced: workers that compute nothing and keep a profile's time."),
    ConfigFlag("--paced-profile", "paced_profile", help="The profile: h200-8b, or a file."),
    ConfigFlag("--device", "device", help="auto, cpu or cuda."),
    ConfigFlag("--gpu-memory-utilization", "gpu_memory_utilization", help="Of a GPU, for weights and KV."),
    ConfigFlag("--dtype", "dtype", help="auto, float32, bfloat16 or float16 (GPUs)."),
    ConfigFlag("--quantization", "quantization", help="auto (as the file is), none, int8 or int4."),
    ConfigFlag("--kv-cache-dtype", "kv_cache_dtype", help="auto (as it is computed), int8 (processors) or fp8 (GPUs)."),
    ConfigFlag("--max-model-len", "max_model_len", help="Tokens of prompt and answer together."),
    ConfigFlag("--hf-overrides", "hf_overrides", help="Keys of the model's config.json as JSON: rope_parameters."),
    ConfigFlag("--block-size", "block_size", help="Tokens per KV block: 8, 16, 32 or 64."),
    ConfigFlag("--max-num-seqs", "decode.max_batch_size", help="Sequences per decode step."),
    ConfigFlag(
        "--max-num-batched-tokens",
        *("prefill.max_batch_tokens", "decode.max_chunk_tokens"),
        help="Prompt tokens per step, of either role.",
    ),
    ConfigFlag(
        "--speculative-config",
        "speculative_config",
        help="How tokens are guessed, as JSON with vLLM's keys: by ngram, or by a draft_model.",
    ),
    ConfigFlag("--kv-offloading-size", "kv_offloading.memory_gib", help="GiB of each node's memory for KV of earlier prompts."),
    ConfigFlag("--kv-offloading-dir", "kv_offloading.disk_dir", help="Folder on each node's disk for KV of earlier prompts."),
    ConfigFlag("--kv-offloading-disk-size", "kv_offloading.disk_gib", help="GiB that it may take."),
    ConfigFlag("--stream-interval", "http.stream_interval", help="Tokens of one event of a stream, after the first."),
    ConfigFlag("--admin-key", "http.admin_key", help="Key for /admin.", envvar="TANDEM_ADMIN_KEY"),
    ConfigFlag("--metrics-key", "http.metrics_key", help="Key for /metrics.", envvar="TANDEM_METRICS_KEY"),
    ConfigFlag("--keys-file", "http.keys_file", help="API keys, as `tandem keys` makes them."),
    ConfigFlag("--audit-log", "telemetry.audit_log", help="File for refusals, operators' actions and changes of keys."),
    ConfigFlag("--usage-log", "telemetry.usage_log", help="File for what each request has used: tenant, key, tokens, stages."),
    ConfigFlag("--usage-kafka", "telemetry.usage_kafka", help="SERVERS/TOPIC of Kafka that gets its lines, too."),
    ConfigFlag("--shutdown-timeout", "limits.shutdown_s", help="Seconds that requests have to end on Ctrl-C or SIGTERM."),
    ConfigFlag("--ssl-keyfile", "http.ssl_keyfile", help="Private key of the certificate, PEM."),
    ConfigFlag("--ssl-certfile", "http.ssl_certfile", help="Certificate, PEM: the cluster answers https."),
    ConfigFlag("--allow-anonymous", "http.allow_anonymous", help="Serve other machines without asking for keys."),
)


@dataclass(frozen=True)
class ConfigFlags:
    """The flags of a table, which a command gets as values by key of the configuration, such as {"http.port": 8001}."""

    table: Sequence[ConfigFlag] = FLAGS

    def parameters(self) -> list[inspect.Parameter]:
        """One parameter for each flag, annotated as Typer reads them."""
        return [each.parameter() for each in self.table]

    def collect(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The values of the given flags by key of the configuration. Raises ConfigError if two flags contradict each other."""
        overrides: dict[str, Any] = {}
        for each in self.table:
            value = given[each.name]
            if value is None:
                continue
            if each.sets is not None:
                self._check_switch(each, given)
                value = each.sets
            overrides |= dict.fromkeys(each.keys, str(value) if isinstance(value, Path) else value)
        return overrides

    def _check_switch(self, switch: ConfigFlag, given: Mapping[str, Any]) -> None:
        """Raises ConfigError if another flag gives the switch's keys another value."""
        for other in self.table:
            value = given[other.name]
            if other.keys == switch.keys and other is not switch and value not in (None, switch.sets):
                raise ConfigError(f"--{switch.name} means {switch.sets}, not {value}", param=switch.keys[0])


def _kind(key: str) -> Any:
    """The type that a flag has for this key: int, float, bool, str or Path. Mappings and sections are read from a text."""
    *sections, name = key.split(".")
    section: Any = ClusterConfig
    for each in sections:
        section = section.model_fields[each].annotation
    annotation = section.model_fields[name].annotation
    if LocalPath in typing.get_args(annotation):
        return Path
    if typing.get_origin(annotation) is dict:
        return str
    while typing.get_origin(annotation) is not None:
        first = typing.get_args(annotation)[0]  # of Annotated, of a union with None, of a Literal
        annotation = first if isinstance(first, type) or typing.get_origin(first) is not None else type(first)
    return str if issubclass(annotation, BaseModel) else annotation
