"""`loraplex serve`: an OpenAI-compatible server."""

import gc
from pathlib import Path
from socket import socket
from typing import Annotated

import typer
from rich.console import Console

from loraplex.cli.launch import Launched, cost_line, launch, ready_line, target_warning
from loraplex.cli.listen import run_bound
from loraplex.cli.say import LogConsole, say
from loraplex.cli.serve_settings import (
    check_registry_flags,
    engine_config,
    host_memory_warning,
    open_port,
    preload_config,
    registry_config,
    runtime_roots,
    server_config,
    start_modules,
    usable_key,
)
from loraplex.cli.sizes import parse_size

_Modules = typer.Option("--lora-modules", help='Adapters: name=path (repeatable), or {"name": ..., "path": ...}.')
_Name = typer.Option(help="Name of the base in requests; default: the directory's name.")
_Key = typer.Option(
    envvar="LORAPLEX_API_KEY",
    help="The one bearer key of a server without a registry, for all routes but /health, /ready and /metrics.",
)
_DataDir = typer.Option(
    envvar="LORAPLEX_DATA_DIR", help="Data directory of the registry: tenants, keys, adapters. Default: no registry."
)
_Database = typer.Option(
    envvar="LORAPLEX_DATABASE_URL", help="PostgreSQL database of the registry; default: SQLite in the data directory."
)
_Artifacts = typer.Option(
    envvar="LORAPLEX_ARTIFACTS_URL",
    help="s3://, gs:// or az:// place of the adapters' files; default: in the data directory.",
)
_NoAuth = typer.Option(
    "--insecure-no-auth", help="Without a registry and a key, listen beyond this machine all the same."
)
_Runtime = typer.Option(
    "--allow-runtime-lora-updating",
    envvar=["LORAPLEX_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"],
    help="Offer vLLM's /v1/load_lora_adapter and /v1/unload_lora_adapter to operators.",
)
_Root = typer.Option("--lora-root", help="Directory below which adapters may be loaded at run time (repeatable).")
_MaxCpuLoras = typer.Option(
    help="With a registry, most adapters in host memory; default: as many as --cpu-lora-memory holds.", min=1
)
_CpuMemory = typer.Option(
    help="Host memory for adapters, for example 8G, in pages of the pool: those of --lora-modules must fit together, "
    "of a registry those in use. Default: a quarter of what is available at the start."
)
_PackedCache = typer.Option(
    help="With a registry, disk for adapters as they lie in memory, for example 100G, in the data directory; 0: none."
)
_Pin = typer.Option(
    "--pin", help="Adapter that stays in the pool, used or not; with a registry tenant/name (repeatable)."
)
_Preload = typer.Option("--preload", help="Adapter to bring into the pool at start, named as for --pin (repeatable).")
_PreloadRecent = typer.Option(
    help="At start, bring in so many of the adapters that the last run used most; while it runs, bring back those that "
    "were pushed out when pages are free.",
    min=0,
)
_PublicMetrics = typer.Option(
    "--public-metrics", help="With a registry, serve /metrics without a key too; it shows names of adapters at work."
)
_EnableLora = typer.Option("--enable-lora", help="Accepted for vLLM's sake; adapters are always enabled.")
_MaxLoras = typer.Option(
    help="Most distinct adapters in one step; reserves no memory. Default: as many as --max-num-seqs.", min=1
)
_MaxRank = typer.Option(help="Refuse adapters of a higher rank; reserves no memory.", min=1)
_Memory = typer.Option(
    help="Memory of the pool, for example 2G; --kv-pages goes first. Default: 1G on the CPU, on a GPU what "
    "--gpu-memory-utilization leaves beside the base."
)
_Share = typer.Option(help="Share of the GPU's memory to use for base, workspace and pool.")
_Eager = typer.Option("--enforce-eager", help="No CUDA graphs: starts sooner, takes less memory, decodes slower.")
_Device = typer.Option(help="auto, cpu, cuda or cuda:<number>; auto takes a GPU where there is one.")
_Budget = typer.Option(help="Token budget of one step; default: 512 on the CPU, 2048 on a GPU.", min=1)
_Mixed = typer.Option(
    help="Token budget of a step in which sequences decode, which wait for it; default: on a GPU with CUDA graphs 512, "
    "or twice --max-num-seqs if that is more, else no bound of its own.",
    min=2,
)
_MaxLen = typer.Option(
    help="Most tokens of prompt and output; default: the model's context, or less if the pool holds less.", min=1
)
_MaxSeqs = typer.Option(
    help="Most sequences in one step; default: 64 on the CPU, 256 on a GPU, or the token budget if that is less.", min=1
)
_MaxWaiting = typer.Option(help="Most sequences in the queue; beyond it 503.", min=1)
_MaxWaitingTokens = typer.Option(help="Most prompt tokens in the queue; beyond it 503. Default: no bound.", min=1)
_Target = typer.Option(
    help="Bound the ranks and prompt tokens of a step so that a token of a decoding sequence takes at most this many "
    "milliseconds, by what the engine measures. Adapters get a tenth of a step whatever it says."
)
_PrefixCaching = typer.Option(help="Compute a prefix once for all requests of a tenant on the same weights.")
_Threads = typer.Option(help="CPU threads; default: the cores this process may use.", min=1)


def serve(
    ctx: typer.Context,
    base: Annotated[Path, typer.Argument(help="Hugging Face directory of the base model.")],
    lora_modules: Annotated[list[str] | None, _Modules] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[str | None, _Name] = None,
    data_dir: Annotated[Path | None, _DataDir] = None,
    database_url: Annotated[str | None, _Database] = None,
    artifacts_url: Annotated[str | None, _Artifacts] = None,
    api_key: Annotated[str | None, _Key] = None,
    insecure_no_auth: Annotated[bool, _NoAuth] = False,
    allow_runtime_lora_updating: Annotated[bool, _Runtime] = False,
    lora_root: Annotated[list[Path] | None, _Root] = None,
    public_metrics: Annotated[bool, _PublicMetrics] = False,
    enable_lora: Annotated[bool, _EnableLora] = True,
    max_loras: Annotated[int | None, _MaxLoras] = None,
    max_cpu_loras: Annotated[int | None, _MaxCpuLoras] = None,
    cpu_lora_memory: Annotated[str | None, _CpuMemory] = None,
    packed_cache_size: Annotated[str, _PackedCache] = "16G",
    pin: Annotated[list[str] | None, _Pin] = None,
    preload: Annotated[list[str] | None, _Preload] = None,
    preload_recent: Annotated[int, _PreloadRecent] = 0,
    max_lora_rank: Annotated[int | None, _MaxRank] = None,
    kv_pages: Annotated[int | None, typer.Option(help="Pages of the pool for KV and adapters.", min=1)] = None,
    memory: Annotated[str | None, _Memory] = None,
    device: Annotated[str, _Device] = "auto",
    gpu_memory_utilization: Annotated[float, _Share] = 0.9,
    enforce_eager: Annotated[bool, _Eager] = False,
    max_model_len: Annotated[int | None, _MaxLen] = None,
    max_num_seqs: Annotated[int | None, _MaxSeqs] = None,
    max_num_batched_tokens: Annotated[int | None, _Budget] = None,
    max_num_mixed_tokens: Annotated[int | None, _Mixed] = None,
    max_waiting: Annotated[int, _MaxWaiting] = 1024,
    max_waiting_tokens: Annotated[int | None, _MaxWaitingTokens] = None,
    tpot_target_ms: Annotated[float | None, _Target] = None,
    enable_prefix_caching: Annotated[bool, _PrefixCaching] = True,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    num_threads: Annotated[int | None, _Threads] = None,
) -> None:
    """Serve a base model and its adapters over an OpenAI-compatible HTTP API."""
    console, engine = LogConsole(stderr=True), engine_config(ctx.params)
    check_registry_flags(ctx, data_dir)
    registry = registry_config(data_dir, database_url, artifacts_url, max_lora_rank)
    key, roots = usable_key(ctx, api_key, registry, console), runtime_roots(allow_runtime_lora_updating, lora_root)
    preloads = preload_config(pin, preload, preload_recent, data_dir)
    config = server_config(key, max_cpu_loras, cpu_lora_memory, roots, public_metrics, preloads)
    modules, sockets = start_modules(lora_modules, registry), open_port(host, port, key, registry, insecure_no_auth)
    packed = parse_size(packed_cache_size, "--packed-cache-size")
    launched = launch(base, modules, engine, config, console, served_model_name, registry, packed)
    run(launched, sockets, host, port, console)


def run(launched: Launched, sockets: list[socket], host: str, port: int, console: Console) -> None:
    """Serve until a signal comes or the engine fails, and clean up. Raises typer.Exit(1) if it failed."""
    from loraplex.server import RunConfig, build_server

    def on_ready(at: str, real_port: int) -> None:
        say(console, ready_line(launched, at, real_port), event="ready")

    if launched.base.note:
        say(console, f"note: {launched.base.note}", style="yellow")
    say(console, cost_line(launched), event="cost_model")
    if (warning := target_warning(launched)) is not None:
        say(console, warning, style="yellow")
    if launched.registry is not None and (warning := host_memory_warning(launched)) is not None:
        say(console, warning, style="yellow")
    server = build_server(launched.app, RunConfig(host=host, port=port), on_ready)
    launched.engine.on_failure = lambda: setattr(server, "should_exit", True)
    gc.collect()
    gc.freeze()  # a full collection would look at all of this again, a tenth of a second at a time, while answers run
    try:
        run_bound(server.run, sockets, host, port)
    finally:
        launched.close()
    if launched.engine.failure is not None:
        raise typer.Exit(1)
