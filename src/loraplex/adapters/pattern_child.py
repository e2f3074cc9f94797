"""The child process of `patterns`. Run as a file, not imported: it loads the standard library only."""

import json
import re
import resource
import sys


def main() -> None:
    """Read the order, limit this process, match, answer. What goes beyond a limit ends with a status other than 0."""
    order = json.load(sys.stdin)
    for kind, limit in (
        (resource.RLIMIT_CPU, order["cpu_s"]),
        (resource.RLIMIT_AS, order["memory_bytes"]),
        (resource.RLIMIT_CORE, 0),
    ):
        allowed = resource.getrlimit(kind)[1]  # a process may lower this, never raise it
        wanted = limit if allowed == resource.RLIM_INFINITY else min(limit, allowed)
        resource.setrlimit(kind, (wanted, wanted))
    rows: list[list[str | None]] = []
    for is_whole, expression in order["patterns"]:
        try:
            compiled = re.compile(expression)
        except (re.error, OverflowError, RecursionError):
            json.dump({"rows": [], "invalid": len(rows)}, sys.stdout)
            return
        match = compiled.fullmatch if is_whole else compiled.match
        found = [match(name) for name in order["names"]]
        rows.append([None if one is None else one.groupdict().get("idx") or "" for one in found])
    json.dump({"rows": rows, "invalid": None}, sys.stdout)


if __name__ == "__main__":
    main()
