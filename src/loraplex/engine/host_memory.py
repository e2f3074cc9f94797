"""How much memory this process may still use, as Linux says."""

from collections.abc import Iterator
from pathlib import Path


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that are free or can be reclaimed, on the machine and in every cgroup around this process.

    None where the system does not say. `root` is where /proc and /sys are found.
    """
    return min([*_of_machine(root), *_of_cgroups(root)], default=None)


def _of_machine(root: Path) -> Iterator[int]:
    found = _table(root / "proc/meminfo").get("MemAvailable:")
    if found is not None:
        yield found * 1024


def _of_cgroups(root: Path) -> Iterator[int]:
    """What each limit leaves, in version 2 and 1. Inside a container the path may lie outside what is mounted."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names = ("memory.max", "memory.current", "inactive_file")
            mount = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            mount = root / "sys/fs/cgroup/memory"
        else:
            continue
        group = mount / path.lstrip("/")
        while group.is_relative_to(mount):
            yield from _left(group, *names)
            group = group.parent


def _left(group: Path, limit_file: str, usage_file: str, reclaimable: str) -> Iterator[int]:
    limit, usage = _read(group / limit_file).strip(), _read(group / usage_file).strip()
    if limit.isdigit() and usage.isdigit():
        yield max(0, int(limit) - int(usage) + _table(group / "memory.stat").get(reclaimable, 0))


def _table(path: Path) -> dict[str, int]:
    """Lines of a name, a number and maybe a unit."""
    rows = (line.split() for line in _read(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
