"""`loraplex demo`: a real small model, two tenants with their adapters, shown on one page, then left serving."""

import os
import tempfile
import threading
from pathlib import Path
from socket import socket
from typing import Annotated

import typer
from rich.console import Console

from loraplex.cli.demo_calls import curl_line
from loraplex.cli.launch import Launched, LoraModule, launch, ready_line
from loraplex.cli.listen import bind_sockets, run_bound
from loraplex.cli.progress import progress_bar
from loraplex.cli.say import say
from loraplex.core import ConfigError

MIN_ADAPTERS = 2


def find_adapters(folder: Path | None) -> list[LoraModule]:
    """The example adapters: of `folder`, else of the checkout. Raises ConfigError for less than two."""
    repository = Path(__file__).resolve().parents[3] / "examples" / "adapters"
    chosen = folder or repository
    configs = sorted(chosen.glob("*/adapter_config.json"))
    if len(configs) < MIN_ADAPTERS:
        message = (
            f"{len(configs)} adapters (*/adapter_config.json) in {chosen}; the demo needs {MIN_ADAPTERS}, one for "
        )
        raise ConfigError(f"{message}each tenant. Name a folder that has them (--adapters).")
    return [LoraModule(config.parent.name, config.parent) for config in configs]


def demo_base(console: Console) -> Path:
    """The demo's base, converted at first use. Raises ConfigError when it is not installed or cannot be kept."""
    import platformdirs

    from loraplex.model.gguf_import import DEMO_NAME, ensure_demo_base

    folder = platformdirs.user_cache_path("loraplex") / DEMO_NAME.lower()
    try:
        with progress_bar(console, f"Converting {DEMO_NAME} (once)") as progress:
            return ensure_demo_base(folder, progress)
    except OSError as error:
        message = f"The base cannot be written to {folder}: {error.strerror}; set XDG_CACHE_HOME to another folder."
        raise ConfigError(message) from error


def demo(
    adapters: Annotated[Path | None, typer.Option(help="Folder of adapter folders; default: the shipped ones.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
) -> None:
    """Serve SmolLM2-135M-Instruct to two tenants with adapters of their own and show what a registry does.

    The registry lies in a temporary directory. Keeps serving afterwards; with DEMO_EXIT=1 in the environment it stops
    instead.
    """
    console = Console()
    modules = find_adapters(adapters)
    sockets = bind_sockets(host, port)
    base_dir = demo_base(console)
    with tempfile.TemporaryDirectory(prefix="loraplex-demo-") as data_dir:
        _serve(base_dir, modules, Path(data_dir), sockets, host, port, console)


def _serve(
    base_dir: Path,
    modules: list[LoraModule],
    data_dir: Path,
    sockets: list[socket],
    host: str,
    port: int,
    console: Console,
) -> None:
    """Start the server, show the scenes in a thread, serve on."""
    from loraplex.engine.config import EngineConfig
    from loraplex.model.gguf_import import DEMO_NAME
    from loraplex.registry import RegistryConfig
    from loraplex.server import RunConfig, ServerConfig, build_server

    config = EngineConfig(memory_bytes=400 * 2**20)
    quiet = ServerConfig(access_log=False)
    launched = launch(base_dir, [], config, quiet, console, DEMO_NAME, RegistryConfig(data_dir))
    failures: list[BaseException] = []

    def show(at: str, real_port: int) -> None:
        try:
            present(launched, modules, at, real_port, data_dir, console)
            if os.environ.get("DEMO_EXIT") == "1":
                server.should_exit = True
        except BaseException as error:
            failures.append(error)
            server.should_exit = True

    def on_ready(at: str, real_port: int) -> None:
        threading.Thread(target=show, args=(at, real_port), name="loraplex-demo", daemon=True).start()

    server = build_server(launched.app, RunConfig(host=host, port=port, lame_duck_s=0.0), on_ready)
    launched.engine.on_failure = lambda: setattr(server, "should_exit", True)
    try:
        run_bound(server.run, sockets, host, port)
    finally:
        launched.close()
    for failure in failures:
        raise failure


def present(
    launched: Launched, modules: list[LoraModule], host: str, port: int, data_dir: Path, console: Console
) -> None:
    """All scenes, then what to try if the server goes on."""
    from loraplex.cli import demo_scenes as scenes
    from loraplex.server.admin_operations import AdminOperations

    registry = launched.registry
    assert registry is not None, "the demo is launched with a registry"
    operations = AdminOperations(registry, registry.local_operator())
    base = launched.base.description
    stage = scenes.Stage(console, operations, base, launched.engine.compare, tuple(modules))
    with progress_bar(console, "Publishing and comparing adapters") as progress:
        cast, made = scenes.set_up(stage, progress)
    say(console, ready_line(launched, host, port))
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    scenes.show_adapters(stage, made)
    scenes.mixed_batch(stage, url, cast)
    scenes.refusals(stage, url, cast)
    scenes.versions(stage, url, cast)
    scenes.damaged(stage)
    scenes.audit_trail(stage)
    if os.environ.get("DEMO_EXIT") == "1":
        return
    say(console, "\nStill serving (stop with Ctrl-C). Try, from another terminal:")
    say(console, f"loraplex adapter list --data-dir {data_dir}")
    say(console, curl_line(url, cast.keys["acme"], cast.names["acme"][0]))
