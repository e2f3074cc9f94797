"""`loraplex demo`: a real small model with real adapters in one batch, shown in a table, then left serving."""

import json
import os
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loraplex.cli.launch import LoraModule, launch, ready_line
from loraplex.cli.listen import bind_sockets, run_bound
from loraplex.cli.progress import progress_bar
from loraplex.cli.say import say
from loraplex.cli.tables import describe_targets
from loraplex.core import ConfigError

QUESTIONS = ("What is the capital of France?", "How do I boil an egg?")
_MAX_TOKENS = 48


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """One answer of the batch, with what the server says it ran."""

    question: str
    model: str
    fingerprint: str
    digest: str
    text: str
    num_tokens: int
    seconds: float


def find_adapters(folder: Path | None) -> list[LoraModule]:
    """The example adapters: of `folder`, else of the checkout. Raises ConfigError when there are none."""
    repository = Path(__file__).resolve().parents[3] / "examples" / "adapters"
    chosen = folder or repository
    configs = sorted(chosen.glob("*/adapter_config.json"))
    if not configs:
        raise ConfigError(f"No adapters (*/adapter_config.json) in {chosen}; name a folder that has some (--adapters).")
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


def ask(url: str, model: str, question: str) -> DemoAnswer:
    """One chat completion through HTTP."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": _MAX_TOKENS,
        "temperature": 0,
    }
    request = urllib.request.Request(  # noqa: S310
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    started = time.perf_counter()
    with urllib.request.urlopen(request, timeout=300) as reply:  # noqa: S310
        answer: dict[str, Any] = json.load(reply)
    adapter = answer["x_loraplex"]["adapter"]
    return DemoAnswer(
        question=question,
        model=answer["model"],
        fingerprint=answer["system_fingerprint"],
        digest=adapter["digest"][:12] if adapter else "-",
        text=answer["choices"][0]["message"]["content"],
        num_tokens=answer["usage"]["completion_tokens"],
        seconds=time.perf_counter() - started,
    )


def ask_all(url: str, models: list[str]) -> tuple[list[DemoAnswer], float]:
    """Every question to every model, all at once; the answers and the seconds they took together."""
    started = time.perf_counter()
    with ThreadPoolExecutor(len(models) * len(QUESTIONS)) as clients:
        pending = [clients.submit(ask, url, model, question) for question in QUESTIONS for model in models]
        answers = [one.result() for one in pending]
    return answers, time.perf_counter() - started


def show(console: Console, answers: list[DemoAnswer], ranks: dict[str, str], seconds: float) -> None:
    """One table a question: who answered, with which weights, what, how fast."""
    for question in QUESTIONS:
        table = Table(title=f"[bold]{question}[/]", title_justify="left", expand=True, show_lines=True)
        table.add_column("adapter", no_wrap=True)
        table.add_column("rank", no_wrap=True)
        table.add_column("digest", no_wrap=True)
        table.add_column("answer", ratio=1, overflow="fold")
        table.add_column("tok/s", justify="right", no_wrap=True)
        for one in answers:
            if one.question == question:
                rate = f"{one.num_tokens / one.seconds:.1f}"
                name = one.model if one.model in ranks else "(base)"
                table.add_row(name, ranks.get(one.model, "-"), one.digest[:8], escape(one.text.strip()), rate)
        console.print(table)
    total = sum(one.num_tokens for one in answers)
    say(
        console,
        f"{len(answers)} requests to {1 + len(ranks)} models in one batch: {total} tokens in {seconds:.2f} s, "
        f"{total / seconds:.0f} tokens/s together.",
    )


def curl_line(url: str, model: str) -> str:
    """The command to try."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Tell me about the sea."}]})
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"


def demo(
    adapters: Annotated[Path | None, typer.Option(help="Folder of adapter folders; default: the shipped ones.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
) -> None:
    """Serve SmolLM2-135M-Instruct with the example adapters and show one mixed batch.

    Keeps serving afterwards; with DEMO_EXIT=1 in the environment it stops instead.
    """
    from loraplex.engine.config import EngineConfig
    from loraplex.model.gguf_import import DEMO_NAME
    from loraplex.server import RunConfig, ServerConfig, build_server

    console = Console()
    modules = find_adapters(adapters)
    sockets = bind_sockets(host, port)
    base_dir = demo_base(console)
    config = EngineConfig(memory_bytes=400 * 2**20)
    launched = launch(base_dir, modules, config, ServerConfig(access_log=False), console, DEMO_NAME)
    ranks = {e.ref.label: f"{e.rank} {describe_targets(e.targets)}" for e in launched.models.catalog.list()}
    failures: list[BaseException] = []

    def present(at: str, real_port: int) -> None:
        try:
            url = f"http://{at}:{real_port}"
            say(console, ready_line(launched, at, real_port))
            answers, seconds = ask_all(url, [DEMO_NAME, *(module.name for module in modules)])
            show(console, answers, ranks, seconds)
            if os.environ.get("DEMO_EXIT") == "1":
                server.should_exit = True
                return
            say(console, "\nStill serving (stop with Ctrl-C). Try:")
            say(console, curl_line(url, modules[0].name))
        except BaseException as error:
            failures.append(error)
            server.should_exit = True

    def on_ready(at: str, real_port: int) -> None:
        threading.Thread(target=present, args=(at, real_port), name="loraplex-demo", daemon=True).start()

    server = build_server(launched.app, RunConfig(host=host, port=port, lame_duck_s=0.0), on_ready)
    launched.engine.on_failure = lambda: setattr(server, "should_exit", True)
    run_bound(server.run, sockets, host, port)
    launched.engine.stop()
    for failure in failures:
        raise failure
