"""`loraplex serve`: an OpenAI-compatible server."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from loraplex.cli.launch import launch, parse_lora_module, ready_line
from loraplex.cli.sizes import parse_size

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(
    base: Annotated[Path, typer.Argument(help="Hugging Face directory of the base model.")],
    lora_modules: Annotated[
        list[str] | None,
        typer.Option("--lora-modules", help='Adapters: name=path (repeatable), or {"name": ..., "path": ...}.'),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name of the base in requests; default: the directory's name.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="LORAPLEX_API_KEY", help="Bearer key that every request must carry.")
    ] = None,
    enable_lora: Annotated[
        bool, typer.Option("--enable-lora", help="Accepted for vLLM's sake; adapters are always enabled.")
    ] = True,
    max_loras: Annotated[int, typer.Option(help="Most distinct adapters in one step; reserves no memory.", min=1)] = 32,
    max_lora_rank: Annotated[
        int | None, typer.Option(help="Refuse adapters of a higher rank; reserves no memory.", min=1)
    ] = None,
    kv_pages: Annotated[int | None, typer.Option(help="Pages of the pool for KV and adapters.", min=1)] = None,
    memory: Annotated[str, typer.Option(help="Memory of the pool, for example 2G; --kv-pages goes first.")] = "1G",
    max_model_len: Annotated[
        int | None, typer.Option(help="Most tokens of prompt and output; default: the model's context.", min=1)
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Most sequences in one step.", min=1)] = 64,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Token budget of one step.", min=1)] = 512,
    max_waiting: Annotated[int, typer.Option(help="Most sequences in the queue; beyond it 503.", min=1)] = 1024,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    num_threads: Annotated[int | None, typer.Option(help="CPU threads; default: all cores.", min=1)] = None,
) -> None:
    """Serve a base model and its adapters over an OpenAI-compatible HTTP API."""
    from loraplex.engine.config import EngineConfig
    from loraplex.server import RunConfig, ServerConfig, build_server

    console = Console(stderr=True)
    engine_config = EngineConfig(
        dtype=dtype,
        num_threads=num_threads,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        kv_pages=kv_pages,
        memory_bytes=parse_size(memory, "--memory"),
        max_waiting=max_waiting,
    )
    modules = [parse_lora_module(text) for text in lora_modules or ()]
    launched = launch(base, modules, engine_config, ServerConfig(api_key=api_key), console, served_model_name)
    if launched.base.note:
        console.print(f"[yellow]note[/] {launched.base.note}", highlight=False, soft_wrap=True)
    if host not in _LOOPBACK and api_key is None:
        console.print(
            f"[yellow]warning[/] listening on {host} without --api-key: whoever reaches it may use every adapter.",
            highlight=False,
            soft_wrap=True,
        )

    def on_ready(at: str, real_port: int) -> None:
        console.print(ready_line(launched, at, real_port), highlight=False, soft_wrap=True)

    server = build_server(launched.app, RunConfig(host=host, port=port), on_ready)
    launched.engine.on_failure = lambda: setattr(server, "should_exit", True)
    server.run()
    launched.engine.stop()
    if launched.engine.failure is not None:
        raise typer.Exit(1)
