"""The demo's scenes: two tenants on one server, from a mixed batch to the audit trail."""

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loraplex.adapters import Adapter
from loraplex.adapters.artifact import CONFIG_FILE, WEIGHTS_FILE
from loraplex.cli.demo_calls import Answer, Question, ask, ask_all
from loraplex.cli.launch import LoraModule
from loraplex.cli.say import say
from loraplex.cli.sizes import format_size
from loraplex.cli.tables import describe_targets
from loraplex.core import AdapterRefused, BaseDescription
from loraplex.core.comparison import AdapterComparison
from loraplex.registry import Role
from loraplex.server.admin_operations import AdminOperations, BaseClaim
from loraplex.server.admin_views import AuditEntryView, VerifiedView

TENANTS = ("acme", "globex")
QUESTION = "How do I boil an egg?"
_SHORT = 8  # digits of a digest
_PEFT_ALPHA = 8  # what PEFT takes where a config has no lora_alpha
_TRAIL = 8  # entries of the audit log that are shown
_FIGURES = (
    "effect: how far the adapter moves the score of a next token (logit), at most",
    "difference: how far serving is from merged weights, of what rounding may do;",
    "            a server that forgot the adapter would be off by its effect",
    "KL: the same in probabilities, on average, in nats (0: equal)",
)


@dataclass(frozen=True, slots=True)
class Stage:
    """A running server with an empty registry, seen by its operator."""

    console: Console
    operations: AdminOperations
    base: BaseDescription
    compare: Callable[[Adapter], AdapterComparison]
    modules: tuple[LoraModule, ...]  # at least two

    def owner(self, module: LoraModule) -> str:
        """The first half belongs to the first tenant."""
        return TENANTS[self.modules.index(module) * 2 >= len(self.modules)]


@dataclass(frozen=True, slots=True)
class Cast:
    """Who calls what: the key of each tenant, and the names of its adapters."""

    keys: dict[str, str]
    names: dict[str, tuple[str, ...]]


def set_up(stage: Stage, progress: Callable[[int, int], None]) -> tuple[Cast, list[VerifiedView]]:
    """Tenants, a key for each, and their adapters: checked, compared with their merged reference, activated."""
    keys = {}
    for tenant in TENANTS:
        stage.operations.create_tenant(tenant)
        keys[tenant] = stage.operations.create_key(tenant, Role.TENANT).api_key
    made = []
    for done, module in enumerate(stage.modules):
        progress(done, len(stage.modules))
        made.append(_publish(stage, stage.owner(module), module.name, module.path))
    names = {tenant: tuple(m.name for m in stage.modules if stage.owner(m) == tenant) for tenant in TENANTS}
    return Cast(keys, names), made


def show_adapters(stage: Stage, made: Sequence[VerifiedView]) -> None:
    """What the registry knows of every adapter."""
    table = _table("adapter", "rank", "targets", "bytes", "effect", "difference", "KL", "digest")
    for one in made:
        version, gate = one.version, one.verification
        figures = (
            f"{gate.effect:.3g}",
            f"{gate.max_logit_difference:.2g} of {gate.tolerance:.2g}",
            f"{gate.kl:.2g}",
        )
        label = f"{version.tenant}/{version.name}"
        targets, size = describe_targets(version.targets or ()), format_size(version.bytes or 0)
        table.add_row(label, str(version.rank), targets, size, *figures, _short(version.digest or ""))
    _title(stage.console, "Two tenants with a key each; every adapter was compared with merged weights")
    stage.console.print(table)
    for line in _FIGURES:
        say(stage.console, line, style="dim")


def mixed_batch(stage: Stage, url: str, cast: Cast) -> None:
    """Both tenants and the base in one batch."""
    questions = [Question("acme", cast.keys["acme"], stage.base.name, QUESTION)]
    questions += [Question(who, cast.keys[who], name, QUESTION) for who in TENANTS for name in cast.names[who]]
    started = time.perf_counter()
    answers = ask_all(url, questions)
    seconds = time.perf_counter() - started
    tokens = sum(one.num_tokens for one in answers)
    rate = f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.0f} tokens/s"
    _title(stage.console, f"One batch, {len(answers)} requests: {QUESTION} ({rate})")
    _show_answers(stage.console, answers)


def refusals(stage: Stage, url: str, cast: Cast) -> None:
    """What belongs to others looks like what is not there."""
    theirs, nothing = f"acme/{cast.names['acme'][0]}", "acme/made-up"
    key = cast.keys["globex"]
    answers = ask_all(
        url,
        [
            Question("globex", key, theirs, QUESTION),
            Question("globex", key, nothing, QUESTION),
            Question("nobody", None, theirs, QUESTION),
        ],
    )
    table = _table("caller", "asks for", "status", "code", "message", is_folded=True)
    for one in answers:
        question = one.question
        table.add_row(question.caller, question.model, str(one.status), one.served_by, escape(one.text))
    _title(stage.console, "Another tenant's adapter looks exactly like none")
    stage.console.print(table)


def versions(stage: Stage, url: str, cast: Cast) -> None:
    """A new version goes live and back; each answer says which weights it ran."""
    name, key = cast.names["acme"][0], cast.keys["acme"]
    question = Question("acme", key, name, QUESTION)
    answers = [ask(url, question)]
    with _copy(stage.modules[0].path) as directory:
        _halve(directory / CONFIG_FILE)
        _publish(stage, "acme", name, directory)
    answers.append(ask(url, question))
    stage.operations.rollback("acme", name, 2)
    answers.append(ask(url, question))
    steps = ("version 1", "version 2 (half the lora_alpha) activated", "rolled back")
    _title(stage.console, f"acme/{name}: " + ", ".join(steps))
    _show_answers(stage.console, answers)


def damaged(stage: Stage) -> None:
    """Files that were cut or hold a NaN are refused with a code."""
    module = stage.modules[0]
    table = _table("damage", "code", "message", is_folded=True)
    for damage, change in (("the file was cut", _cut), ("one weight is NaN", _spoil)):
        with _copy(module.path) as directory:
            change(directory / WEIGHTS_FILE)
            code, message = "accepted", "-"
            try:
                stage.operations.publish("acme", "damaged", directory, stage.base, _claim(stage.base))
            except AdapterRefused as refused:
                code, message = refused.reason_code, refused.message
        table.add_row(damage, code, escape(message))
    _title(stage.console, f"A damaged copy of {module.name} is refused, and that is on record")
    stage.console.print(table)


def audit_trail(stage: Stage) -> None:
    """What happened to acme, and whether the record is whole."""
    entries = stage.operations.audit_entries("acme", 0, 1000).entries
    report = stage.operations.verify_audit()
    table = _table("entry", "action", "details")
    for entry in entries[-_TRAIL:]:
        table.add_row(str(entry.seq), entry.action, escape(_details(entry)))
    whole = "whole" if report.ok else "BROKEN"
    title = f"Audit trail of acme, the last {min(_TRAIL, len(entries))} of {len(entries)}"
    _title(stage.console, f"{title}; {report.entries} entries in {report.chains} chains verified: {whole}")
    stage.console.print(table)


# ---------------------------------------------------------------------- inside
def _publish(stage: Stage, tenant: str, name: str, directory: Path) -> VerifiedView:
    """Publish, compare and activate a version."""
    operations = stage.operations
    version = operations.publish(tenant, name, directory, stage.base, _claim(stage.base)).version
    verified = operations.compare(tenant, name, version, stage.base, stage.compare)
    operations.activate(tenant, name, version, version - 1 or None)
    return verified


def _claim(base: BaseDescription) -> BaseClaim:
    """The examples were trained on this very base (examples/adapters/README.md)."""
    return BaseClaim(base_fingerprint=base.fingerprint)


@contextmanager
def _copy(directory: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="loraplex-") as folder:
        copy = Path(folder) / "adapter"
        shutil.copytree(directory, copy)
        yield copy


def _halve(config: Path) -> None:
    """Half of lora_alpha is half of what the adapter adds."""
    fields = json.loads(config.read_bytes())
    fields["lora_alpha"] = fields.get("lora_alpha", _PEFT_ALPHA) / 2
    fields["alpha_pattern"] = {name: alpha / 2 for name, alpha in (fields.get("alpha_pattern") or {}).items()}
    config.write_text(json.dumps(fields))


def _cut(weights: Path) -> None:
    weights.write_bytes(weights.read_bytes()[:-1000])


def _spoil(weights: Path) -> None:
    """All bits set are a NaN in every type of float that is served."""
    data = weights.read_bytes()
    weights.write_bytes(data[:-4] + b"\xff\xff\xff\xff")


def _details(entry: AuditEntryView) -> str:
    """What tells entries apart at a glance."""
    names = ("name", "key", "role", "adapter", "version", "from_version", "to_version", "passed", "refusal", "digest")
    known = ((name, entry.details.get(name)) for name in names)
    return ", ".join(
        f"{name} {_short(str(value)) if name == 'digest' else value}" for name, value in known if value is not None
    )


def _show_answers(console: Console, answers: Sequence[Answer]) -> None:
    table = _table("caller", "answered by", "digest", "answer")
    for one in answers:
        table.add_row(one.question.caller, escape(one.served_by), _short(one.digest), escape(one.text))
    console.print(table)


def _table(*headings: str, is_folded: bool = False) -> Table:
    """One line a row, so that all fits on a page; the last column takes the room that is left."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, expand=True, collapse_padding=True)
    for heading in headings[:-1]:
        table.add_column(heading, no_wrap=True)
    table.add_column(headings[-1], ratio=1, no_wrap=not is_folded, overflow="fold" if is_folded else "ellipsis")
    return table


def _title(console: Console, text: str) -> None:
    say(console, f"\n{text}", style="bold")


def _short(digest: str) -> str:
    return digest[:_SHORT]
