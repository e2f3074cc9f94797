"""`loraplex serve`: an OpenAI-compatible server."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from loraplex.cli.launch import launch, parse_lora_module, ready_line
from loraplex.cli.listen import bind_sockets, run_bound
from loraplex.cli.say import say
from loraplex.cli.sizes import parse_size

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


_Modules = typer.Option("--lora-modules", help='Adapters: name=path (repeatable), or {"name": ..., "path": ...}.')
_Name = typer.Option(help="Name of the base in requests; default: the directory's name.")
_Key = typer.Option(envvar="LORAPLEX_API_KEY", help="Bearer key for all routes but /health, /ready and /metrics.")
_EnableLora = typer.Option("--enable-lora", help="Accepted for vLLM's sake; adapters are always enabled.")
_MaxLoras = typer.Option(help="Most distinct adapters in one step; reserves no memory.", min=1)
_MaxRank = typer.Option(help="Refuse adapters of a higher rank; reserves no memory.", min=1)
_Memory = typer.Option(
    help="Memory of the pool, for example 2G; --kv-pages goes first. Default: 1G on the CPU, on a GPU what "
    "--gpu-memory-utilization leaves beside the base."
)
_Share = typer.Option(help="Share of the GPU's memory to use for base, workspace and pool.")
_Eager = typer.Option("--enforce-eager", help="No CUDA graphs: starts sooner, takes less memory, decodes slower.")
_Device = typer.Option(help="auto, cpu, cuda or cuda:<number>; auto takes a GPU where there is one.")
_Budget = typer.Option(help="Token budget of one step; default: 512 on the CPU, 2048 on a GPU.", min=1)
_MaxLen = typer.Option(
    help="Most tokens of prompt and output; default: the model's context, or less if the pool holds less.", min=1
)
_MaxSeqs = typer.Option(
    help="Most sequences in one step; default: 64 on the CPU, 256 on a GPU, or the token budget if that is less.", min=1
)
_MaxWaiting = typer.Option(help="Most sequences in the queue; beyond it 503.", min=1)
_Threads = typer.Option(help="CPU threads; default: the cores this process may use.", min=1)


def serve(
    base: Annotated[Path, typer.Argument(help="Hugging Face directory of the base model.")],
    lora_modules: Annotated[list[str] | None, _Modules] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[str | None, _Name] = None,
    api_key: Annotated[str | None, _Key] = None,
    enable_lora: Annotated[bool, _EnableLora] = True,
    max_loras: Annotated[int, _MaxLoras] = 32,
    max_lora_rank: Annotated[int | None, _MaxRank] = None,
    kv_pages: Annotated[int | None, typer.Option(help="Pages of the pool for KV and adapters.", min=1)] = None,
    memory: Annotated[str | None, _Memory] = None,
    device: Annotated[str, _Device] = "auto",
    gpu_memory_utilization: Annotated[float, _Share] = 0.9,
    enforce_eager: Annotated[bool, _Eager] = False,
    max_model_len: Annotated[int | None, _MaxLen] = None,
    max_num_seqs: Annotated[int | None, _MaxSeqs] = None,
    max_num_batched_tokens: Annotated[int | None, _Budget] = None,
    max_waiting: Annotated[int, _MaxWaiting] = 1024,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    num_threads: Annotated[int | None, _Threads] = None,
) -> None:
    """Serve a base model and its adapters over an OpenAI-compatible HTTP API."""
    from loraplex.engine.config import EngineConfig
    from loraplex.server import RunConfig, ServerConfig, build_server

    console = Console(stderr=True)
    engine_config = EngineConfig(
        dtype=dtype,
        device=device,
        num_threads=num_threads,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        kv_pages=kv_pages,
        memory_bytes=None if memory is None else parse_size(memory, "--memory"),
        gpu_memory_utilization=gpu_memory_utilization,
        enforce_eager=enforce_eager,
        max_waiting=max_waiting,
    )
    modules = [parse_lora_module(text) for text in lora_modules or ()]
    sockets = bind_sockets(host, port)
    launched = launch(base, modules, engine_config, ServerConfig(api_key=api_key), console, served_model_name)
    if launched.base.note:
        say(console, f"note: {launched.base.note}", style="yellow")
    if host not in _LOOPBACK and api_key is None:
        warning = f"warning: listening on {host} without --api-key: whoever reaches it may use every adapter."
        say(console, warning, style="yellow")

    def on_ready(at: str, real_port: int) -> None:
        say(console, ready_line(launched, at, real_port))

    server = build_server(launched.app, RunConfig(host=host, port=port), on_ready)
    launched.engine.on_failure = lambda: setattr(server, "should_exit", True)
    run_bound(server.run, sockets, host, port)
    launched.engine.stop()
    if launched.engine.failure is not None:
        raise typer.Exit(1)
