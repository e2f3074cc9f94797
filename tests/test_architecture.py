"""The rules of rooms, sizes and dangerous calls, read from the source by `ast`, and rooms imported without torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import loraplex

ROOT = Path(loraplex.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# What a room may import of ours, besides itself. `cli` and `testing` may use anything.
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "adapters": {"core"},
    "registry": {"core", "adapters"},
    "pool": {"core"},
    "scheduler": {"core", "pool"},
    "kernels": set(),
    "model": {"core", "kernels"},
    "engine": {"core", "adapters", "pool", "scheduler", "kernels", "model"},
    "server": {"core", "adapters", "registry"},
    "fleet": {"core", "server", "engine"},
    "planner": {"core", "adapters", "pool", "scheduler"},
}
FREE_ROOMS = {"cli", "testing"}
PURE_ROOMS = ("core", "pool", "scheduler")
# No clock, randomness, environment, thread or I/O among these.
PURE_MODULES = {"__future__", "abc", "bisect", "collections", "collections.abc", "dataclasses", "enum", "functools"}
PURE_MODULES |= {"heapq", "itertools", "math", "operator", "types", "typing"}
IMPURE_BUILTINS = {"breakpoint", "input", "open", "print"}
HEAVY = {"flashinfer", "gguf", "peft", "ray", "torch", "transformers", "triton"}
WITHOUT_TORCH = ("core", "adapters", "registry", "pool", "scheduler", "planner", "server")
IMPORTED_WITHOUT_TORCH = (*WITHOUT_TORCH, "testing.fake_engine")

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
UNSAFE_MODULES = {"cloudpickle", "cPickle", "dill", "jsonpickle", "joblib", "marshal", "pickle", "shelve"}
UNSAFE_NAMES = {"auto_map", "trust_remote_code"}
UNSAFE_CALLS = {"compile", "eval", "exec"}
UNSAFE_ATTRIBUTES = {"extractall", "unpack_archive"}
YAML_LOADS = {"full_load", "full_load_all", "load", "load_all", "unsafe_load", "unsafe_load_all"}
JINJA_BARE = {"Environment", "NativeEnvironment", "SandboxedEnvironment", "Template"}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def room_of(path: Path) -> str:
    """First folder below the package; empty for its `__init__.py`."""
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else ""


def files_of(*rooms: str) -> list[Path]:
    return [path for path in FILES if room_of(path) in rooms]


def absolute(node: ast.ImportFrom, path: Path) -> str:
    """Full name of the module of a `from` import."""
    if not node.level:
        return node.module or ""
    package = ("loraplex", *path.relative_to(ROOT).parts[:-1])
    base = ".".join(package[: len(package) - node.level + 1])
    return f"{base}.{node.module}" if node.module else base


def dynamic_import(node: ast.Call) -> str | None:
    """Module that `importlib.import_module("x")` or `__import__("x")` names; "?" if it is not a constant."""
    if dotted(node.func).rpartition(".")[2] not in ("import_module", "__import__"):
        return None
    first = node.args[0] if node.args else None
    return str(first.value) if isinstance(first, ast.Constant) else "?"


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, those inside functions too. `from loraplex import x` gives `loraplex.x`."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = absolute(node, path)
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "loraplex" else [module]
            yield from ((node.lineno, name) for name in names)
        elif isinstance(node, ast.Call) and (module := dynamic_import(node)) is not None:
            yield node.lineno, module


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an expression; the parts that are no names are left out."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def calls(path: Path) -> Iterator[tuple[ast.Call, str]]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            yield node, dotted(node.func)


def is_false(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


# ---------------------------------------------------------------------- rooms
def test_every_folder_is_a_known_room() -> None:
    rooms = {room_of(path) for path in FILES} - {""}
    assert rooms <= set(ALLOWED) | FREE_ROOMS
    assert {name_of(path) for path in FILES if not room_of(path)} <= {"__init__.py", "__main__.py"}


@pytest.mark.parametrize("room", ALLOWED)
def test_room_imports_only_rooms_below_it(room: str) -> None:
    wrong = []
    for path in files_of(room):
        for line, module in imports(path):
            parts = module.split(".")
            if parts[0] == "loraplex" and parts[1:2] != [room] and not set(parts[1:2]) & ALLOWED[room]:
                wrong.append(f"{name_of(path)}:{line} imports {module}")
    assert wrong == []


def test_package_itself_imports_only_core_at_once() -> None:
    """What it offers beyond that is imported when asked for; the child processes below hold it to that."""
    statements = [node for node in tree(ROOT / "__init__.py").body if isinstance(node, (ast.Import, ast.ImportFrom))]
    lines = {node.lineno for node in statements}
    modules = {module for line, module in imports(ROOT / "__init__.py") if line in lines}
    assert {module for module in modules if module.startswith("loraplex")} <= {"loraplex.core"}


def test_modules_are_not_imported_by_computed_names() -> None:
    wrong = [f"{name_of(path)}:{line}" for path in FILES for line, module in imports(path) if module == "?"]
    assert wrong == []


@pytest.mark.parametrize("room", PURE_ROOMS)
def test_pure_room_has_no_clock_randomness_threads_or_io(room: str) -> None:
    wrong = []
    for path in files_of(room):
        for line, module in imports(path):
            if module not in PURE_MODULES and module.partition(".")[0] != "loraplex":
                wrong.append(f"{name_of(path)}:{line} imports {module}")
        wrong += [
            f"{name_of(path)}:{call.lineno} calls {name}" for call, name in calls(path) if name in IMPURE_BUILTINS
        ]
    assert wrong == []


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_light_room_imports_nothing_heavy(room: str) -> None:
    found = [(path, line, module) for path in files_of(room) for line, module in imports(path)]
    wrong = [
        f"{name_of(path)}:{line} imports {module}" for path, line, module in found if module.split(".")[0] in HEAVY
    ]
    assert wrong == []


@pytest.mark.parametrize("module", IMPORTED_WITHOUT_TORCH)
def test_module_imports_while_torch_is_blocked(module: str) -> None:
    code = f"import sys\nfor name in {sorted(HEAVY)}:\n    sys.modules[name] = None\nimport loraplex.{module}\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_only_fleet_knows_ray_and_only_server_knows_http() -> None:
    owners = {"ray": "fleet", "fastapi": "server", "starlette": "server", "uvicorn": "server"}
    wrong = []
    for path in FILES:
        for line, module in imports(path):
            owner = owners.get(module.partition(".")[0])
            if owner is not None and room_of(path) not in (owner, "cli"):
                wrong.append(f"{name_of(path)}:{line} imports {module}")
    assert wrong == []


# ---------------------------------------------------------------------- sizes
def test_files_are_short() -> None:
    lines = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {name: count for name, count in lines.items() if count > MAX_FILE_LINES} == {}


def test_functions_are_short() -> None:
    long = []
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                count = (node.end_lineno or node.lineno) - node.lineno + 1
                if count > MAX_FUNCTION_LINES:
                    long.append(f"{name_of(path)}:{node.lineno} {node.name} has {count} lines")
    assert long == []


# ---------------------------------------------------------------------- gates (RELIABILITY.md, T03)
def unsafe_import(path: Path) -> Iterator[str]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            if node.module in ("jinja2", "jinja2.environment", "jinja2.sandbox") and names & JINJA_BARE:
                yield f"{path.name}:{node.lineno} takes {sorted(names & JINJA_BARE)} from {node.module}"
            if node.module == "torch" and "load" in names:
                yield f"{path.name}:{node.lineno} takes torch.load"
            if node.module == "yaml" and names & YAML_LOADS:
                yield f"{path.name}:{node.lineno} takes {sorted(names & YAML_LOADS)} from yaml"
    for line, module in imports(path):
        if set(module.split(".")) & UNSAFE_MODULES:
            yield f"{path.name}:{line} imports {module}"


def unsafe_call(path: Path) -> Iterator[str]:
    for call, name in calls(path):
        owner, _, last = name.rpartition(".")
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        is_bad = (
            name in UNSAFE_CALLS
            or last in UNSAFE_ATTRIBUTES
            or (owner == "torch" and last == "load")
            or (owner == "torch.hub")
            or (owner == "yaml" and last in YAML_LOADS)
            or (owner.split(".")[0] == "jinja2" and last in JINJA_BARE)
            or ("allow_pickle" in keywords and not is_false(keywords["allow_pickle"]))
            or any(arg in UNSAFE_NAMES and not is_false(value) for arg, value in keywords.items())
        )
        if is_bad:
            yield f"{path.name}:{call.lineno} calls {name}"


def unsafe_name(path: Path) -> Iterator[str]:
    """Names and keys that stand for code in data. A keyword `trust_remote_code=False` is a call, judged above."""
    for node in ast.walk(tree(path)):
        names = {getattr(node, field, None) for field in ("id", "attr")}
        names |= {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()
        if names & UNSAFE_NAMES:
            yield f"{path.name}:{getattr(node, 'lineno', 0)} uses {sorted(names & UNSAFE_NAMES)}"


def bendable(path: Path) -> Iterator[str]:
    """Addresses that a request's Host header can change (RELIABILITY.md, T08)."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and node.attr in ("base_url", "url", "url_for", "url_path_for"):
            yield f"{path.name}:{node.lineno} uses .{node.attr}"


def test_the_server_never_looks_at_the_address_of_a_request() -> None:
    assert [found for path in files_of("server") for found in bendable(path)] == []


def test_the_gate_of_addresses_finds_them(tmp_path: Path) -> None:
    path = tmp_path / "case.py"
    path.write_text("def is_public(request):\n    return request.url.path == '/health'\n")
    assert list(bendable(path)) == ["case.py:2 uses .url"]


def unsafe(path: Path) -> list[str]:
    return [*unsafe_import(path), *unsafe_call(path), *unsafe_name(path)]


def test_nothing_unsafe_is_imported_or_called() -> None:
    assert {name_of(path): found for path in FILES if (found := unsafe(path))} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from dill import loads",
        "import torch.multiprocessing, marshal",
        "def f():\n    import shelve",
        "import importlib\nimportlib.import_module('pickle')",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "np.load('x', allow_pickle=flag)",
        "import yaml\nyaml.load(text)",
        "from yaml import unsafe_load",
        "eval('1')",
        "exec(text)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
        "config['auto_map']",
        "tarfile.open(x).extractall(y)",
        "shutil.unpack_archive(x)",
        "import jinja2\njinja2.Environment()",
        "from jinja2 import Environment",
        "from jinja2.sandbox import SandboxedEnvironment",
    ],
)
def test_gate_finds(code: str, tmp_path: Path) -> None:
    path = tmp_path / "case.py"
    path.write_text(code)
    assert unsafe(path)


@pytest.mark.parametrize(
    "code",
    [
        "import numpy as np\nnp.load('x', allow_pickle=False)",
        "AutoModel.from_pretrained(x, trust_remote_code=False)",
        "import yaml\nyaml.safe_load(text)",
        "from jinja2.sandbox import ImmutableSandboxedEnvironment",
        "import re\nre.compile('x')",
        "model.eval()",
        "import json\njson.load(file)",
    ],
)
def test_gate_lets_pass(code: str, tmp_path: Path) -> None:
    path = tmp_path / "case.py"
    path.write_text(code)
    assert unsafe(path) == []
