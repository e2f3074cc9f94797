"""The documents say what the code does: nothing is undocumented, nothing documented is gone, every link resolves."""

import importlib.util
import re
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

from loraplex.adapters import limits as adapter_limits
from loraplex.adapters import peft_config
from loraplex.cli.main import app
from loraplex.core import AdapterResidence, LoraplexError, OverloadReason, RefusalReason, SamplingParams, limits
from loraplex.server.engine_metrics import EngineCollector
from loraplex.server.errors import HTTP_CODES, kind_of
from loraplex.server.host_figures import HostFigures
from loraplex.server.metrics import Metrics
from loraplex.server.residency_routes import RESIDENCY_ROUTES
from loraplex.server.routes import ROUTES
from loraplex.server.schema import ChatBody, CompletionBody, DetokenizeBody, Message, StreamOptions, TokenizeBody
from loraplex.server.waiters import Waiters
from loraplex.testing import FakeEngine

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ADR_SECTIONS = ("## Context", "## Choice", "## What we gave up", "## What would reverse it")


def read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def rows(text: str) -> Iterator[list[str]]:
    """The cells of every table row, header and ruler rows included."""
    for line in text.splitlines():
        if line.startswith("|"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def section(text: str, heading: str) -> str:
    """What stands under a heading, up to the next one of its level or above."""
    level = len(heading) - len(heading.lstrip("#"))
    start = text.index(f"\n{heading}\n") + 1
    following = re.search(rf"^#{{1,{level}}} ", text[start + len(heading) :], re.MULTILINE)
    return text[start:] if following is None else text[start : start + len(heading) + following.start()]


def names_in(text: str) -> set[str]:
    """Everything that is set in code type and is one word."""
    return set(re.findall(r"`([^`\s]+)`", text))


# ---------------------------------------------------------------------- commands
def make_cli_docs() -> Any:
    spec = importlib.util.spec_from_file_location("make_cli_docs", DOCS / "make_cli_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_cli_docs_are_what_the_commands_say() -> None:
    assert read("cli.md") == make_cli_docs().command_docs(), "run: python docs/make_cli_docs.py"


def test_every_option_is_documented() -> None:
    group: Any = typer.main.get_command(app)
    text = read("cli.md")
    for name, command in group.commands.items():
        under = section(text, f"## `loraplex {name}`")
        options = {opt for param in command.params for opt in param.opts if opt.startswith("-")}
        assert options <= names_in(under)
        assert all(param.help for param in command.params)


# ---------------------------------------------------------------------- errors
def error_classes(cls: type[LoraplexError] = LoraplexError) -> Iterator[type[LoraplexError]]:
    yield cls
    for child in cls.__subclasses__():
        if child.__module__.startswith("loraplex."):
            yield from error_classes(child)


def test_every_error_class_is_documented_with_its_code_and_status() -> None:
    documented = {
        cells[0].strip("`"): (cells[1].strip("`"), int(cells[2]))
        for cells in rows(section(read("errors.md"), "## Error codes"))
        if cells[0].startswith("`")
    }
    actual = {}
    for cls in error_classes():
        error = cls.__new__(cls)  # constructors differ; the status depends on the class alone
        actual[cls.__name__] = (cls.code, kind_of(error).status)
    assert documented == actual


def test_every_http_code_is_documented() -> None:
    table = section(read("errors.md"), "## Codes of HTTP itself")
    documented = {int(cells[0]): cells[1].strip("`") for cells in rows(table) if cells[0].isdigit()}
    assert documented == dict(HTTP_CODES)


def test_every_reason_of_an_overload_is_documented() -> None:
    table = section(read("errors.md"), "## Reasons of overload")
    documented = {cells[0].strip("`"): cells[1:] for cells in rows(table) if cells[0].startswith("`")}
    assert set(documented) == {reason.value for reason in OverloadReason}
    assert all(meaning and advice for meaning, advice in documented.values())


def test_every_refusal_reason_is_documented() -> None:
    table = section(read("errors.md"), "## Reason codes")
    documented = {cells[0].strip("`"): cells[1:] for cells in rows(table) if cells[0].startswith("`")}
    assert set(documented) == {reason.value for reason in RefusalReason}
    assert all(meaning and advice for meaning, advice in documented.values())


# ---------------------------------------------------------------------- HTTP
def test_every_route_is_documented_with_its_key() -> None:
    documented = {cells[0].strip("`"): cells[1] for cells in rows(read("http-api.md")) if len(cells) == 3}
    for route in (*ROUTES, *RESIDENCY_ROUTES):
        shown = f"{route.method} {route.path.replace(':path', '')}"
        assert documented.get(shown) == ("no" if route.public else "yes"), shown


def test_every_field_of_a_residence_is_documented() -> None:
    table = section(read("http-api.md"), "## Where adapters are")
    documented = {cells[0].strip("`") for cells in rows(table) if cells[0].startswith("`")}
    assert documented == {field.name for field in fields(AdapterResidence)} | {"names"}


@pytest.mark.parametrize("schema", [CompletionBody, ChatBody, TokenizeBody, DetokenizeBody, Message, StreamOptions])
def test_every_field_of_a_body_is_documented(schema: Any) -> None:
    assert sorted(set(schema.model_fields) - names_in(read("http-api.md"))) == []


@pytest.mark.parametrize("schema", [CompletionBody, ChatBody])
def test_every_unsupported_field_is_documented(schema: Any) -> None:
    table = section(read("http-api.md"), "### Not supported")
    assert sorted(set(schema.unsupported) - names_in(table)) == []


def test_every_sampling_parameter_is_documented() -> None:
    assert sorted({field.name for field in fields(SamplingParams)} - names_in(read("http-api.md"))) == []


LIMITED_FIELDS = {
    "MAX_N": "n",
    "MAX_STOP_STRINGS": "stop",
    "MAX_STOP_STRING_CHARS": "stop",
    "MAX_STOP_TOKEN_IDS": "stop_token_ids",
    "MAX_LOGPROBS": "top_logprobs",
    "MAX_LOGIT_BIAS": "logit_bias",
    "MAX_ABS_LOGIT_BIAS": "logit_bias",
    "MAX_TEMPERATURE": "temperature",
    "MAX_ABS_PENALTY": "presence_penalty",
    "MIN_REPETITION_PENALTY": "repetition_penalty",
    "MAX_REPETITION_PENALTY": "repetition_penalty",
    "MAX_SEED": "seed",
    "MIN_SEED": "seed",
    "MAX_TOP_K": "top_k",
    "MAX_TOKENS": "max_tokens",
    "MAX_DEADLINE_S": "deadline_s",
    "MAX_PROMPTS": "prompt",
    "MAX_MESSAGES": "messages",
    "MAX_DETOKENIZED_TOKENS": "tokens",
    "MAX_MODEL_NAME_CHARS": "model",
}


def test_every_limit_is_documented_beside_its_field() -> None:
    by_field = {cells[0].strip("`"): cells[-1] for cells in rows(read("http-api.md")) if len(cells) == 3}
    for name, value in vars(limits).items():
        if not name.isupper():
            continue
        if name == "MAX_BODY_BYTES":
            text = read("http-api.md")
        elif name == "MAX_ADAPTER_NAME_CHARS":
            text = section(read("adapters.md"), "## Names")
        else:
            text = by_field[LIMITED_FIELDS[name]]
        assert re.search(
            rf"(?<![\d.]){re.escape(f'{value:.10g}' if value != int(value) else str(int(value)))}(?!\d)", text
        ), name


# ---------------------------------------------------------------------- metrics
def test_every_metric_is_documented_with_its_type() -> None:
    waiters = Waiters(FakeEngine())
    metrics = Metrics(EngineCollector(FakeEngine().stats, lambda: HostFigures(0), waiters.figures, lambda digests: {}))
    metrics.observe_http("/health", 200)
    scraped = re.findall(r"^# TYPE (\S+) (\S+)$", metrics.render().decode(), re.MULTILINE)
    actual = {name: kind for name, kind in scraped if not name.endswith("_created")}
    documented = {cells[0].strip("`"): cells[1] for cells in rows(read("metrics.md")) if cells[0].startswith("`")}
    assert documented == actual


# ---------------------------------------------------------------------- adapters
def test_every_known_config_field_is_documented() -> None:
    known = peft_config._READ | peft_config._BENIGN | set(peft_config._OFF_WHEN_EMPTY) | set(peft_config._OFF_WHEN_NULL)
    assert sorted(known - names_in(read("adapters.md"))) == []


def test_limits_on_adapters_are_documented() -> None:
    table = section(read("adapters.md"), "## Limits")
    assert f"| {adapter_limits.MAX_CONFIG_BYTES >> 20} MiB |" in table
    assert f"| {adapter_limits.MAX_HEADER_BYTES >> 20} MiB |" in table
    assert f"| {adapter_limits.DEFAULT_MAX_BYTES >> 30} GiB |" in table
    assert f"| {adapter_limits.MAX_TENSORS:,} |" in table
    assert f"| {adapter_limits.MAX_TENSOR_DIMS} |" in table


def test_reason_codes_in_the_adapter_page_exist() -> None:
    named = {name for name in names_in(read("adapters.md")) if re.fullmatch(r"[A-Z]+_[A-Z_]+|NONFINITE", name)}
    assert sorted(named - {reason.value for reason in RefusalReason} - {"CAUSAL_LM"}) == []


# ---------------------------------------------------------------------- decisions, links, paths
def test_decision_records_are_numbered_and_whole() -> None:
    records = sorted((DOCS / "adr").glob("*.md"))
    assert [int(record.name[:4]) for record in records] == list(range(1, len(records) + 1))
    for record in records:
        text = record.read_text(encoding="utf-8")
        assert text.startswith(f"# ADR {record.name[:4]}: ")
        positions = [text.index(f"\n{heading}\n") for heading in ADR_SECTIONS]
        assert positions == sorted(positions)


def tracked_files() -> list[Path]:
    """Files that are in the repository or about to be."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    paths = (ROOT / name for name in listed.split("\0") if name)
    return [path for path in paths if path.is_file()]


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of a document's headings."""
    without_code = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", without_code, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_documents_resolve() -> None:
    broken = []
    for document in (path for path in tracked_files() if path.suffix == ".md"):
        for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
            if re.match(r"[a-z]+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (document.parent / name).resolve() if name else document
            found = target.exists() and (not anchor or anchor in anchors(target.read_text(encoding="utf-8")))
            if not found:
                broken.append(f"{document.relative_to(ROOT)}: {link}")
    assert broken == []


# One letter of each is a character class, so that this file passes its own test.
MACHINE_PATHS = re.compile(r"/[w]ork/|/[h]ome/\w|/[r]oot/|/[U]sers/\w|\.[l]ibrary\b|[i]ndex-url")


def test_no_tracked_file_names_a_place_on_some_machine() -> None:
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in MACHINE_PATHS.finditer(text)]
    assert found == []
