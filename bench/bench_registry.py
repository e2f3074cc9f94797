"""Time to authenticate, resolve and list in a registry of 10,000 adapters of 1,000 tenants, in process.

Rows are inserted at once, not published one by one. "cold" is the first use of each adapter or key by a fresh process,
which asks the database; "warm" is every later use; beside writes, another process or thread moves pointers of random
tenants as fast as the disk lets it. Times are wall times of single calls. A thread that works in the same process adds
waits for Python's lock, up to 5 ms, whatever it does. The last line of output is JSON.

Usage: python bench/bench_registry.py [--tenants 1000] [--adapters 10] [--calls 50000] [--database-url URL] [--out FILE]
"""

import argparse
import json
import os
import platform
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy
from rich.console import Console
from rich.table import Table
from sqlalchemy import insert

from loraplex.core import BaseDescription, BaseFingerprint
from loraplex.registry import Principal, Registry, RegistryConfig, Role, schema
from loraplex.registry.tenants import new_id

BASE = BaseDescription("base", BaseFingerprint("0" * 64), "llama", 32, 1, False, ())
OPERATOR = Registry.local_operator()


def digest(rng: random.Random) -> str:
    return rng.randbytes(32).hex()


def fill(registry: Registry, num_tenants: int, num_adapters: int) -> None:
    """Tenants `t0` .. with adapters `a0` .., each with two verified versions, the second active."""
    rng = random.Random(0)
    names = ("tenants", "adapters", "versions", "aliases")
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for t in range(num_tenants):
        tenant = new_id()
        rows["tenants"].append({"tenant_id": tenant, "name": f"t{t}", "created_at": 1.0, "epoch": 1})
        for a in range(num_adapters):
            ids = {"adapter_id": new_id(), "tenant_id": tenant}
            rows["adapters"].append({**ids, "name": f"a{a}", "next_number": 3, "created_at": 1.0})
            rows["versions"] += [version_row(rng, ids, number) for number in (1, 2)]
            rows["aliases"].append({**ids, "active_number": 2, "revision": 1})
    with registry._store.change(OPERATOR) as change:
        for name in names:
            change.connection.execute(insert(schema.metadata.tables[name]), rows[name])
        change.record(None, OPERATOR.key_id, "bench.fill")


def version_row(rng: random.Random, ids: dict[str, str], number: int) -> dict[str, Any]:
    return {
        **ids,
        "number": number,
        "state": "verified",
        "base_fingerprint": BASE.fingerprint,
        "base_verified": True,
        "digest": digest(rng),
        "max_rank": 16,
        "num_bytes": 1 << 20,
        "targets": "q_proj,v_proj",
        "config_key": digest(rng),
        "config_bytes": 500,
        "weights_key": digest(rng),
        "weights_bytes": 1 << 20,
        "created_at": 1.0,
        "created_by": "local",
    }


def measure(call: Callable[[Any], object], arguments: Iterable[Any]) -> dict[str, float]:
    """Quantiles of single calls, in microseconds."""
    times = []
    for argument in arguments:
        start = time.perf_counter()
        call(argument)
        times.append(time.perf_counter() - start)
    times.sort()
    at = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}
    found = {name: round(1e6 * times[int(share * (len(times) - 1))], 1) for name, share in at.items()}
    return {**found, "max": round(1e6 * times[-1], 1), "calls": len(times)}


def write(registry: Registry, args: argparse.Namespace, stop: threading.Event) -> int:
    """Move pointers of random adapters until stopped; returns how many."""
    rng, num_moves = random.Random(1), 0
    while not stop.is_set():
        tenant, name = f"t{rng.randrange(args.tenants)}", f"a{rng.randrange(args.adapters)}"
        active = registry.adapters.show(OPERATOR, tenant, name).info.alias.active
        registry.adapters.activate(OPERATOR, tenant, name, 3 - (active or 1), expected=active)
        num_moves += 1
    return num_moves


@contextmanager
def writing_thread(registry: Registry, args: argparse.Namespace) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=write, args=(registry, args, stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def writing_process(config: RegistryConfig, args: argparse.Namespace) -> Iterator[None]:
    command = [sys.executable, __file__, f"--tenants={args.tenants}", f"--adapters={args.adapters}"]
    command += [f"--database-url={config.database_url}"] if config.database_url else []
    command.append(f"--write-in={config.data_dir}")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it has begun
        yield
        process.communicate()


def write_until_end_of_input(args: argparse.Namespace) -> None:
    stop = threading.Event()
    with Registry(RegistryConfig(args.write_in, database_url=args.database_url)) as registry:
        thread = threading.Thread(target=write, args=(registry, args, stop))
        thread.start()
        print("begun", flush=True)
        sys.stdin.read()
        stop.set()
        thread.join()


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    config = RegistryConfig(folder, database_url=args.database_url)
    with Registry(config) as registry:
        fill(registry, args.tenants, args.adapters)
        tenants = [f"t{t}" for t in range(args.tenants)]
        keys = [registry.keys.create(OPERATOR, name, Role.TENANT).key.reveal() for name in tenants]
    rng = random.Random(2)
    with Registry(config) as registry:

        def resolve(pair: tuple[Principal, str]) -> object:
            return registry.resolve(pair[0], pair[1], BASE)

        results = {"authenticate cold": measure(registry.authenticate, keys)}
        results["authenticate warm"] = measure(registry.authenticate, rng.choices(keys, k=args.calls))
        callers = [registry.authenticate(key) for key in keys]
        pairs = [(caller, f"a{a}") for caller in callers for a in range(args.adapters)]
        rng.shuffle(pairs)
        results["resolve cold"] = measure(resolve, pairs)
        results["resolve warm"] = measure(resolve, rng.choices(pairs, k=args.calls))
        first = num_entries(registry)
        start = time.monotonic()
        with writing_process(config, args):
            results["resolve beside a writing process"] = measure(resolve, paced(rng, pairs, args.calls // 5))
        moves_s = (num_entries(registry) - first) / (time.monotonic() - start)
        with writing_thread(registry, args):
            results["resolve beside a writing thread"] = measure(resolve, paced(rng, pairs, args.calls // 5))
        results["list_models, page of 100"] = measure(lambda caller: registry.list_models(caller, BASE), callers)
        results["adapters.list, page of 100"] = measure(lambda name: registry.adapters.list(OPERATOR, name), tenants)
    return {"results_us": results, "moves_per_s": round(moves_s, 1)}


def num_entries(registry: Registry) -> int:
    return registry.verify_audit(OPERATOR).num_entries


def paced(rng: random.Random, pairs: list[tuple[Principal, str]], count: int) -> Iterable[tuple[Principal, str]]:
    """Requests that come at random, 2,000 a second on average, as to a server that also does other things."""
    for _ in range(count):
        time.sleep(rng.expovariate(2_000))
        yield rng.choice(pairs)


def environment() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "commit": commit,
        "host": socket.gethostname(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "sqlalchemy": sqlalchemy.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, default=1_000)
    parser.add_argument("--adapters", type=int, default=10, help="of each tenant")
    parser.add_argument("--calls", type=int, default=50_000)
    parser.add_argument("--database-url", help="an empty PostgreSQL database; default: SQLite in a temporary directory")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--write-in", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write_in is not None:
        write_until_end_of_input(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        measured = run(args, Path(folder))
    database = "sqlite" if args.database_url is None else "postgresql"
    report = {"bench": "registry", "database": database, "tenants": args.tenants, "adapters": args.adapters}
    report |= {**measured, **environment(), "seed": 0}
    table = Table("microseconds", "p50", "p99", "p99.9", "max", "calls")
    for name, row in measured["results_us"].items():
        table.add_row(name, *(f"{row[column]:g}" for column in ("p50", "p99", "p99.9", "max", "calls")))
    Console(file=sys.stderr).print(table, f"{measured['moves_per_s']} pointer moves a second beside the reads")
    line = json.dumps(report)
    if args.out is not None:
        args.out.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
