"""Run by test_publish_crash: forks once for each step of an operation and kills the child there with SIGKILL.

    python crash_child.py DATA_DIR ADAPTER_DIR OPERATION

Each line of output: the step, and what the child had been promised before it died ("-" for nothing).
"""

import os
import signal
import sys
from pathlib import Path

from loraplex.registry import Registry, RegistryConfig, Role, VersionState

from .helpers import BASE, OPERATOR, PASSED, check_here


def perform(registry: Registry, operation: str, directory: Path) -> str:
    """The operation, and what it acknowledges."""
    if operation == "publish":
        version = registry.publish(OPERATOR, "acme", "sup", directory, BASE, base_unverified=True)
        return f"version {version.number}"
    adapters = registry.adapters
    detail = adapters.show(OPERATOR, "acme", "sup")
    active = detail.info.alias.active
    if operation == "verify":
        last = detail.versions[-1].number
        adapters.record_verification(OPERATOR, "acme", "sup", last, PASSED)
        return f"verified {last}"
    if operation == "activate":
        target = 1 if active != 1 else 2
        adapters.activate(OPERATOR, "acme", "sup", target, expected=active)
        return f"active {target}"
    if operation == "key":
        return f"key {registry.keys.create(OPERATOR, 'acme', Role.TENANT).key.key_id}"
    last = max(version.number for version in detail.versions if version.state is not VersionState.DELETED)
    adapters.delete_version(OPERATOR, "acme", "sup", last)
    return f"deleted {last}"


def run_once(data_dir: Path, directory: Path, operation: str, step: int) -> tuple[str, str]:
    """Do it in a forked child that dies at its `step`-th step; the step's name, "done" where it had fewer."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        count = 0

        def on_step(name: str) -> None:
            nonlocal count
            count += 1
            if count == step:
                os.write(write_end, f"{name}\n".encode())
                os.kill(os.getpid(), signal.SIGKILL)

        registry = Registry(RegistryConfig(data_dir), validate=check_here, on_step=on_step)
        os.write(write_end, f"done\n{perform(registry, operation, directory)}\n".encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        lines = pipe.read().splitlines()
    _, status = os.waitpid(pid, 0)
    if lines[0] == "done":
        return "done", lines[1]
    if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
        raise RuntimeError(f"the child was to be killed, but ended with {status}")
    return lines[0], "-"


def main() -> None:
    data_dir, directory, operation = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    step, name = 0, ""
    while name != "done":
        step += 1
        name, promised = run_once(data_dir, directory, operation, step)
        print(f"{name}\t{promised}", flush=True)


if __name__ == "__main__":
    main()
