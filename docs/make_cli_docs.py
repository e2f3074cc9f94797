"""Writes docs/cli.md from the commands themselves. tests/test_docs.py checks that the file is current.

Usage: python docs/make_cli_docs.py
"""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import typer

from loraplex.cli.main import app

TARGET = Path(__file__).with_name("cli.md")

_INTRO = """\
# The `loraplex` command

Made by `python docs/make_cli_docs.py` from the commands' own help; do not edit by hand.
"""

_HEAD = ["| option | default | meaning |", "|---|---|---|"]

_NOTES = """\

## Notes

- Write the base directory before `--lora-modules`: the option takes every word up to the next option, so
  `--lora-modules a=/adapters/a b=/adapters/b` loads two adapters.
- `--max-loras` and `--max-lora-rank` are limits and reserve nothing. The size of the pool is `--kv-pages`, or else
  `--memory`. Beside the pool, host memory holds one packed copy of each loaded adapter, and on the CPU the base's
  weights.
- On a GPU the pool takes what base and workspace leave of `--gpu-memory-utilization`, unless `--memory` or
  `--kv-pages` says otherwise. Kernels are compiled at first start (about a minute; later starts find them in
  `~/.cache/flashinfer` and `~/.triton`) and CUDA graphs captured at every start. A GPU needs the extra `cuda`:
  `pip install 'loraplex[cuda]'`.
- `--dtype auto` takes the type that the base's `config.json` declares, and float32 if it declares none.
- Unless `--max-model-len` says otherwise, the longest sequence is the smaller of the base's context and what the pool
  holds. A `--max-model-len` above either is refused at start.
- A pool of more bytes than this process may still use (`MemAvailable`, and what its cgroups leave) is refused.
- The port is taken before anything is loaded, and answers once `Ready` is printed.
- An adapter whose config names another base is served with a warning ([adapters.md](adapters.md#the-base-it-names)).
- CPU kernels that cannot be written to the cache folder are compiled at each start, in a temporary directory.
- `import-gguf` needs the extra `gguf`: `pip install 'loraplex[gguf]'`, or `pip install '.[gguf]'` in a checkout.
- Sizes are written like `512M`, `1.5GiB` or `1073741824`; units are powers of 1024.
- A base, an adapter or a setting that cannot be served, and whatever else the caller can mend, is one line on standard
  error, `error CODE: message`, and exit status 2. The codes are in [errors.md](errors.md). What is broken elsewhere (a
  database, a store, a server that cannot be reached) ends with 3. A command line that cannot be parsed shows the usage
  and also ends with 2. If the engine fails while it serves, `serve` ends with status 1. A stop by SIGTERM or SIGINT
  ends with 0.
- On SIGTERM `GET /ready` answers 503 at once, `serve` closes its port after 5 s, and running answers have 45 s to end.
  SIGINT skips the 5 s, and so does `demo`. A second signal ends the process without waiting.

## The administrator's commands

`adapter`, `tenant`, `key` and `audit` work either on a data directory, as the local operator, or on a running server
through its [admin API](admin-api.md), with the rights of the key in `LORAPLEX_API_KEY`. They do the same and print the
same. A server may run on the data directory meanwhile.

```bash
export LORAPLEX_DATA_DIR=data
loraplex tenant create acme
loraplex adapter add my-adapter --tenant acme --name support --base my-base \\
    --base-fingerprint $(loraplex fingerprint my-base) --activate
loraplex key create --tenant acme
loraplex adapter list
loraplex serve my-base --data-dir data
```

- Adapters are written `tenant/name`, versions `tenant/name@3`. `name` alone means the tenant of the key.
- `adapter add` checks the two files of a directory, keeps them as the next version, has an engine compare it with its
  merged reference, and activates it if asked to. On a data directory that needs the base (`--base`), whose engine is
  loaded for it; a server has its own. If the comparison fails, the status is 1 and the version stays out of service.
- Which base an adapter was trained on is said by `--base-fingerprint`, or by
  [the file's own metadata](registry.md#versions), or it is `--base-unverified`.
- `hf:org/repo@revision`, or `hf:org/repo/folder@revision` for an adapter in a folder, takes exactly the two files of
  one commit of Hugging Face, which is printed and goes to the audit log. It needs the extra `hub`:
  `pip install 'loraplex[hub]'`. Private repositories: `HF_TOKEN`. If Hugging Face does not answer, the error is
  `hub_unreachable` and the status 3.
- A data directory without a registry is refused, and nothing is made there. `tenant create`, `serve` and `demo` make
  one.
- `adapter add` records nothing where the directory or one of its two files is not there. What is there and refused is
  recorded with its reason and takes a number.
- An adapter that changes nothing (`no-op`), or no logit by more than rounding may (`faint`: its effect is not above the
  tolerance of the comparison), passes the comparison with a warning and is marked in `adapter list`.
- `activate` and `rollback` change nothing if another version is active than `--expect` says, or than was active when
  the command started.
- `rm` asks first unless `--yes` is given.
- `key create` prints the key, and nothing else, on standard output.
- `adapter add`, `adapter verify` and `audit verify` end with status 1 where the comparison failed or the log is broken.
- With `--json` there is one JSON document on standard output, and all else on standard error. Its objects are those of
  the [admin API](admin-api.md#objects):

| command | document |
|---|---|
| `adapter add` | `{"version": version, "verification": verification, "alias": alias or null}` |
| `adapter list` | `{"adapters": [adapter, ...]}` |
| `adapter show` | adapter detail |
| `adapter verify` | `{"version": version, "verification": verification}` |
| `adapter activate`, `adapter rollback` | alias |
| `adapter rm` | `{"tenant", "name", "version"}`; `version` is null for the whole adapter |
| `adapter grant`, `adapter revoke` | `{"tenant", "name", "grantee", "granted"}` |
| `tenant create`, `tenant disable`, `tenant enable` | tenant |
| `tenant list` | `{"tenants": [tenant, ...]}` |
| `key create` | `{"api_key": text, "key": key}` |
| `key list` | `{"keys": [key, ...]}` |
| `key revoke` | key |
| `audit list` | `{"tenant": name, "entries": [entry, ...]}` |
| `audit verify` | audit report |

## Environment

| variable | meaning |
|---|---|
| `LORAPLEX_API_KEY` | `serve`: the same as `--api-key`, not in the process list; else the key to use on a server |
| `LORAPLEX_DATA_DIR` | the same as `--data-dir` |
| `LORAPLEX_DATABASE_URL` | the same as `--database-url` |
| `LORAPLEX_ARTIFACTS_URL` | the same as `--artifacts-url` |
| `LORAPLEX_URL` | the same as `--url` |
| `DEMO_EXIT` | `1`: `loraplex demo` ends after its page instead of serving on |
| `OMP_WAIT_POLICY` | `passive` unless you set it ([ADR 0004](adr/0004-native-cpu-kernels.md)) |
| `XDG_CACHE_HOME` | what is kept lies there in `loraplex/`: compiled CPU kernels, the demo's base; else `~/.cache` |
| `CXX` | the C++ compiler for the CPU kernels; without it `g++`, then `clang++` |
"""


def command_docs() -> str:
    """The whole file."""
    group: Any = typer.main.get_command(app)
    parts = [_INTRO, f"\n{group.help}\n"]
    for name, command in group.commands.items():
        parts.append(_group(name, command) if hasattr(command, "commands") else _command(name, command, "##"))
    return "".join(parts) + _NOTES


def _group(name: str, group: Any) -> str:
    """A command of commands. Options that all of them take, with the same meaning, are told once."""
    rows = [set(_rows(_only_options(command))) for command in group.commands.values()]
    shared = set.intersection(*rows)
    parts = [f"\n## `loraplex {name}`\n\n{group.help}\n"]
    parts += [_command(f"{name} {inner}", command, "###", shared) for inner, command in group.commands.items()]
    first = next(iter(group.commands.values()))
    told = [row for row in _rows(_only_options(first)) if row in shared]
    return "\n".join(["".join(parts), "All of them also take:", "", *_HEAD, *told, ""])


def _command(name: str, command: Any, level: str, told: Collection[str] = ()) -> str:
    """One command, without those rows of options that are `told` elsewhere."""
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = [row for row in _rows(_only_options(command)) if row not in told]
    usage = " ".join(["loraplex", name, *(param.name.upper() for param in arguments), "[OPTIONS]"])
    lines = ["", f"{level} `loraplex {name}`", "", f"    {usage}", "", *(command.help or "").splitlines()]
    if arguments:
        lines += ["", "| argument | meaning |", "|---|---|"]
        lines += [f"| `{param.name.upper()}` | {_cell(param.help)} |" for param in arguments]
    if options:
        lines += ["", *_HEAD, *options]
    return "\n".join([*lines, ""])


def _only_options(command: Any) -> list[Any]:
    return [param for param in command.params if param.param_type_name == "option"]


def _rows(params: Iterable[Any]) -> list[str]:
    """The rows of a table of options: names, default and meaning."""
    return [f"| {_names(param)} | {_default(param)} | {_cell(param.help)}{_bounds(param)} |" for param in params]


def _names(param: Any) -> str:
    return ", ".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts))


def _default(param: Any) -> str:
    """Empty for none, and for switches, whose presence is the value."""
    return "" if param.default is None or param.is_flag else f"`{param.default}`"


def _bounds(param: Any) -> str:
    """What range a number may have; older versions of typer keep it in the parameter's type."""
    owner = param if hasattr(param, "min") else getattr(param, "type", None)
    low, high = getattr(owner, "min", None), getattr(owner, "max", None)
    known = [f"at least {low}" if low is not None else "", f"at most {high}" if high is not None else ""]
    text = ", ".join(part for part in known if part)
    return f" ({text})" if text else ""


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|")


if __name__ == "__main__":
    TARGET.write_text(command_docs(), encoding="utf-8")
