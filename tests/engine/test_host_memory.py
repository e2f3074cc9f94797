"""Memory that is left, read from copies of Linux's files."""

from pathlib import Path

import pytest

from loraplex.engine.host_memory import available_memory

GIB = 2**30


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    return root


MACHINE = {"proc/meminfo": "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\nHugePages_Total:  0"}
V1 = "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, None),
        (MACHINE, 8 * GIB),
        (MACHINE | {"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/memory.max": "max"}, 8 * GIB),
        (
            MACHINE
            | {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/memory.max": 4 * GIB,
                "sys/fs/cgroup/a/memory.current": 3 * GIB,
                "sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {GIB}",
            },
            2 * GIB,
        ),
        (
            MACHINE  # the path of a container's host, while the container's own group is mounted
            | {
                "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/elsewhere",
                f"{V1}/memory.limit_in_bytes": 2 * GIB,
                f"{V1}/memory.usage_in_bytes": GIB,
            },
            GIB,
        ),
        (
            MACHINE
            | {
                "proc/self/cgroup": "4:memory:/",
                f"{V1}/memory.limit_in_bytes": 2**63 - 4096,
                f"{V1}/memory.usage_in_bytes": GIB,
            },
            8 * GIB,
        ),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": 5, "sys/fs/cgroup/memory.current": 9}, 0),
    ],
)
def test_the_tightest_limit_counts(files: dict[str, object], available: int | None, tmp_path: Path) -> None:
    assert available_memory(write(tmp_path, files)) == available


def test_this_machine_says_something_plausible() -> None:
    available = available_memory()
    assert available is None or 2**20 < available < 2**50
