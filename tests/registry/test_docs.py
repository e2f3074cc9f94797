"""docs/registry.md says what the code does."""

import ast
import re
from dataclasses import fields
from pathlib import Path

from loraplex import registry
from loraplex.core import LoraplexError
from loraplex.core import registry_errors as errors
from loraplex.registry import Role, SandboxLimits, VersionState
from loraplex.registry.directory_store import RESERVE_BYTES
from loraplex.registry.limits import MAX_PAGE, RegistryLimits
from loraplex.registry.names import MAX_TENANT_NAME_CHARS

TEXT = (Path(__file__).parents[2] / "docs" / "registry.md").read_text(encoding="utf-8")
SOURCE = Path(registry.__file__).parent


def rows(heading: str) -> dict[str, list[str]]:
    """The cells of the table under a heading, by what stands in code type in the first."""
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {name: row[1:] for row in cells for name in re.findall(r"`([^`]+)`", row[0])}


def own_errors() -> dict[str, str]:
    found = vars(errors).values()
    own = [cls for cls in found if isinstance(cls, type) and issubclass(cls, LoraplexError)]
    return {cls.__name__: cls.code for cls in own if cls.__module__ == errors.__name__}


def test_every_error_is_documented_exported_and_in_the_tree() -> None:
    assert {name: row[0].strip("`") for name, row in rows("Errors").items()} == own_errors()
    assert set(own_errors()) <= set(registry.__all__)
    drawn = set(re.findall(r"[─ ] (\w+)(?: \(core\))? {2,}\w", errors.__doc__ or "")) - {"ModelNotFound"}
    assert drawn == set(own_errors())
    assert len(set(own_errors().values())) == len(own_errors())


def test_every_state_and_role_is_documented() -> None:
    assert list(rows("Versions")) == [state.value for state in VersionState]
    assert list(rows("Roles")) == [role.value for role in Role]


def test_every_audited_action_is_documented() -> None:
    """Read from the calls of `record` in the source; f-strings and conditions included."""
    used = set()
    for path in SOURCE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                used |= set(re.findall(r"^(?:tenant|key|version|adapter|grant|artifacts)\.[a-z_]+$", node.value))
    used |= {"alias.activate", "alias.rollback"}
    assert set(rows("Audit log")) == used


def test_limits_are_documented() -> None:
    limits, table = RegistryLimits(), TEXT.split("\n## Limits\n")[1].split("\n## ")[0]
    for field in fields(RegistryLimits):
        value = getattr(limits, field.name)
        shown = f"{value >> 40} TiB" if field.name == "max_bytes" else f"{value:,}"
        assert f"| {shown} | `RegistryLimits.{field.name}` |" in table
    assert f"| {MAX_PAGE:,} |" in table
    assert f"| {MAX_TENANT_NAME_CHARS} |" in table
    assert f"| {RESERVE_BYTES >> 20} MiB |" in table
    sandbox = SandboxLimits()
    assert f"{sandbox.memory_bytes >> 30} GiB of memory" in TEXT
    assert f"{sandbox.cpu_s} s of processor time, {sandbox.wall_s:g} s in all" in TEXT
