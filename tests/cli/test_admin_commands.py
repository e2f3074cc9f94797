"""`loraplex adapter`, `tenant`, `key` and `audit`: the same on a data directory and on a server."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import typer

from loraplex.cli.main import app
from loraplex.core.comparison import AdapterComparison
from loraplex.registry import Role
from tests.adapters.factories import make_tensors, write_safetensors
from tests.registry.helpers import OPERATOR, adapter_dir, bad_adapter_dir

from .hostile import hostile_files, leftovers
from .places import FAILED, FINGERPRINT, PASSED, Commands, Place


# ---------------------------------------------------------------------- adapters
def test_an_adapter_is_added_verified_and_activated(place: Place, tmp_path: Path) -> None:
    added = place.run.good(*place.add(adapter_dir(tmp_path, 1), "support", "--activate"))
    version, verification = added["version"], added["verification"]
    assert (version["version"], version["state"], version["rank"]) == (1, "verified", 2)
    assert (version["base_fingerprint"], version["base_verified"]) == (FINGERPRINT, True)
    assert (verification["passed"], verification["skipped"], verification["tolerance"]) == (True, False, 0.01)
    assert added["alias"]["active"] == 1
    (listed,) = place.run.good("adapter", "list")["adapters"]
    assert listed["active_version"] == listed["latest_version"] == version
    assert listed["active"] == 1
    assert place.engine.compared == [version["digest"]]


def test_the_list_answers_base_rank_targets_bytes_state_and_version_of_every_adapter(
    place: Place, tmp_path: Path
) -> None:
    place.run.good(*place.add(adapter_dir(tmp_path, 1), "one", "--activate"))
    place.run.good(*place.add(adapter_dir(tmp_path, 2), "two", "--base-unverified"))
    ran = place.run("adapter", "list")
    rows = {line.split()[0]: line for line in ran.out.splitlines() if "acme/" in line}
    assert rows["acme/one"].split()[1:8] == ["1", "1", "verified", FINGERPRINT[:12], "2", "q,v", "448"]
    assert f"{FINGERPRINT[:12]} ? " in rows["acme/two"]
    assert rows["acme/two"].split()[1] == "-"


def test_a_failed_comparison_is_status_1_and_nothing_is_activated(place: Place, tmp_path: Path) -> None:
    place.engine.comparison = FAILED
    ran = place.run(*place.add(adapter_dir(tmp_path, 1), "support", "--activate"))
    assert ran.status == 1
    assert "FAILED verification" in ran.out
    detail = place.run.good("adapter", "show", "acme/support")
    assert (detail["adapter"]["active"], detail["versions"][0]["state"]) == (None, "validated")
    assert [one["passed"] for one in detail["verifications"]] == [False]
    again = place.run("adapter", "verify", "acme/support", *place.base, "--json")
    assert (again.status, again.document["verification"]["attempt"]) == (1, 2)
    assert "adapter_not_verified" in place.run.refused("adapter", "activate", "acme/support@1")


def test_a_failure_beside_the_logits_is_not_told_as_one_of_the_logits(place: Place, tmp_path: Path) -> None:
    """The figures alone would read as if it had passed."""
    wrong = "model.layers.0.self_attn.q_proj adds something else than the adapter"
    place.engine.comparison = AdapterComparison(1e-4, 1e-6, 0.5, 1e-2, wrong)
    ran = place.run(*place.add(adapter_dir(tmp_path, 1)))
    assert ran.status == 1
    assert f"FAILED verification: largest logit difference 0.0001 of 0.01 allowed, and {wrong}." in " ".join(
        ran.out.split()
    )
    (kept,) = place.run.good("adapter", "show", "acme/support")["verifications"]
    assert kept["failure"] == wrong
    place.engine.comparison = FAILED
    assert "allowed, and" not in place.run("adapter", "verify", "acme/support@1", *place.base).out


def test_a_comparison_that_is_left_out_is_on_record(place: Place, tmp_path: Path) -> None:
    added = place.run.good(*place.add(adapter_dir(tmp_path, 1), "support", "--skip-verification"))
    assert (added["version"]["state"], added["verification"]["skipped"]) == ("skipped", True)
    assert place.engine.compared == []
    actions = [entry["action"] for entry in place.run.good("audit", "list", "--tenant", "acme")["entries"]]
    assert actions[-1] == "version.skip_verification"
    later = place.run.good("adapter", "verify", "acme/support@1", *place.base)
    assert later["version"]["state"] == "verified"


def test_pointers_move_only_from_where_they_were_said_to_be(place: Place, tmp_path: Path) -> None:
    for seed in (1, 2):
        place.run.good(*place.add(adapter_dir(tmp_path, seed), "support", "--activate"))
    assert "version_conflict" in place.run.refused("adapter", "activate", "acme/support@1", "--expect", "none")
    assert "version_conflict" in place.run.refused("adapter", "rollback", "acme/support", "--expect", "1")
    assert place.run.good("adapter", "rollback", "acme/support", "--expect", "2")["active"] == 1
    assert place.run.good("adapter", "activate", "acme/support@2")["active"] == 2
    assert place.run("adapter", "rollback", "acme/support").out == "acme/support stands for version 1 now; before: 2.\n"
    assert "version_state" in place.run.refused("adapter", "rollback", "acme/support")


def test_another_activation_between_show_and_move_wins(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The expected version is what was active at the start, so a change by others is never undone unseen."""
    place.run.good(*place.add(adapter_dir(tmp_path, 1), "support", "--activate"))
    compare = place.engine.compare

    def meanwhile(adapter: object) -> object:
        other = place.world.verified("acme", "support", 9)
        place.world.registry.adapters.activate(OPERATOR, "acme", "support", other.number, expected=1)
        return compare(adapter)  # type: ignore[arg-type]

    monkeypatch.setattr(type(place.engine), "compare", lambda engine, adapter: meanwhile(adapter))
    if place.name == "local":
        monkeypatch.setattr(
            "loraplex.cli.local_client.load_comparer", lambda base: (place.engine.description, meanwhile)
        )
    ran = place.run(*place.add(adapter_dir(tmp_path, 2), "support", "--activate"))
    assert (ran.status, "version_conflict" in ran.err) == (2, True)
    assert place.world.registry.adapters.show(OPERATOR, "acme", "support").info.alias.active == 3


def test_deleting_asks_first(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.run.good(*place.add(adapter_dir(tmp_path, 1), "support"))
    monkeypatch.setattr("typer.confirm", lambda question, err: False)
    assert "Nothing was changed" in place.run.refused("adapter", "rm", "acme/support")
    assert len(place.run.good("adapter", "list")["adapters"]) == 1
    asked: list[str] = []
    monkeypatch.setattr("typer.confirm", lambda question, err: asked.append(question) or True)
    deleted = place.run.good("adapter", "rm", "acme/support")
    assert (asked, deleted["version"]) == (["Delete acme/support with all its versions?"], None)
    assert place.run.good("adapter", "list")["adapters"] == []
    assert [one["deleted"] for one in place.run.good("adapter", "list", "--deleted")["adapters"]] == [True]
    assert "adapter_deleted" in place.run.refused("adapter", "activate", "acme/support@1")


def test_one_version_is_deleted_without_asking_where_yes_was_said(place: Place, tmp_path: Path) -> None:
    for seed in (1, 2):
        place.run.good(*place.add(adapter_dir(tmp_path, seed), "support", "--activate"))
    assert "version_conflict" in place.run.refused("adapter", "rm", "acme/support@2", "--yes")
    assert place.run.good("adapter", "rm", "acme/support@1", "--yes")["version"] == 1
    states = [one["state"] for one in place.run.good("adapter", "show", "acme/support")["versions"]]
    assert states == ["deleted", "verified"]


def test_grants_are_given_and_taken(place: Place, tmp_path: Path) -> None:
    place.run.good(*place.add(adapter_dir(tmp_path, 1), "support"))
    assert place.run.good("adapter", "grant", "acme/support", "beta")["granted"] is True
    assert "granted to: beta" in place.run("adapter", "show", "acme/support").out
    assert place.run.good("adapter", "revoke", "acme/support", "beta")["granted"] is False
    assert "tenant_not_found" in place.run.refused("adapter", "revoke", "acme/support", "beta")


def test_a_refused_adapter_is_one_line_with_its_code_and_is_on_record(place: Place, tmp_path: Path) -> None:
    line = place.run.refused(*place.add(bad_adapter_dir(tmp_path)))
    assert line.startswith("error NONFINITE: ")
    (version,) = place.run.good("adapter", "show", "acme/support")["versions"]
    assert (version["state"], version["refusal"], version["digest"]) == ("refused", "NONFINITE", None)
    assert "refused NONFINITE" in place.run("adapter", "list").out
    assert "no version that could be compared" in place.run.refused("adapter", "verify", "acme/support", *place.base)


def test_a_file_that_names_its_base_needs_no_option(place: Place, tmp_path: Path) -> None:
    directory = adapter_dir(tmp_path, 1)
    weights = write_safetensors(make_tensors(), {"base_fingerprint": FINGERPRINT})
    (directory / "adapter_model.safetensors").write_bytes(weights)
    words = ("adapter", "add", directory, "--tenant", "acme", "--name", "a", *place.base)
    assert place.run.good(*words)["version"]["base_verified"] is True


def test_which_base_must_be_said_in_one_way(place: Place, tmp_path: Path) -> None:
    words = ("adapter", "add", adapter_dir(tmp_path), "--tenant", "acme", "--name", "a", *place.base)
    assert "base_unverified" in place.run.refused(*words)
    both = ("--base-fingerprint", FINGERPRINT, "--base-unverified")
    assert "either" in place.run.refused(*words, *both)
    assert "BASE_MISMATCH" in place.run.refused(*words, "--base-fingerprint", "1" * 64)


@pytest.mark.parametrize(
    "words", [("show", "nobody/x"), ("show", "acme/x"), ("activate", "acme/x@1"), ("rm", "acme/x", "-y")]
)
def test_what_is_not_there_is_said_so(place: Place, words: tuple[str, ...]) -> None:
    line = place.run.refused("adapter", *words)
    assert line.startswith(("error tenant_not_found: ", "error model_not_found: "))


@pytest.mark.parametrize("text", ["acme/x@0", "acme/x@y", "acme/x@", "acme/x@1@2"])
def test_versions_are_numbers(place: Place, text: str) -> None:
    assert "names no version" in place.run.refused("adapter", "activate", text)


def test_activate_wants_a_version(place: Place) -> None:
    assert "acme/x@3" in place.run.refused("adapter", "activate", "acme/x")


@pytest.mark.parametrize(
    ("effect", "mark", "warning"),
    [(0.0, "no-op", "acme/support@1 changes nothing"), (0.01, "faint", "no logit by more than 0.01"), (0.011, "", "")],
)
def test_an_adapter_that_does_little_is_warned_of_and_marked(
    place: Place, tmp_path: Path, effect: float, mark: str, warning: str
) -> None:
    """Where it is added, verified and activated; the mark has a legend."""
    place.engine.comparison = AdapterComparison(0.0, 0.0, effect, 0.01)
    added = place.run(*place.add(adapter_dir(tmp_path, 1), "support", "--activate"))
    verified = place.run("adapter", "verify", "acme/support@1", *place.base)
    moved = place.run("adapter", "activate", "acme/support@1")
    for ran in (added, verified, moved):
        assert ran.status == 0
        warnings = [line for line in ran.err.splitlines() if line.startswith("warning: ")]
        assert [warning in line for line in warnings] == ([True] if mark else [])
    listed = place.run("adapter", "list").out
    (row,) = [line.split() for line in listed.splitlines() if "acme/support" in line]
    assert row[3:5] == ["verified", mark or FINGERPRINT[:12]]
    assert ("no-op: changes nothing" in listed) == bool(mark)


def test_a_version_that_failed_or_was_not_compared_has_no_mark(place: Place, tmp_path: Path) -> None:
    """Figures of a failed comparison say nothing of the effect, and there are none of a skipped one."""
    place.run.good(*place.add(adapter_dir(tmp_path, 1), "skipped", "--skip-verification"))
    place.engine.comparison = AdapterComparison(2.0, 0.3, 0.0, 1e-2)
    failed = place.run(*place.add(adapter_dir(tmp_path, 2), "failed"))
    assert "warning" not in failed.err
    listed = place.run("adapter", "list").out
    assert "no-op" not in listed


def test_a_later_comparison_takes_the_mark_away(place: Place, tmp_path: Path) -> None:
    place.engine.comparison = AdapterComparison(0.0, 0.0, 0.0, 0.01)
    place.run.good(*place.add(adapter_dir(tmp_path, 1)))
    assert "no-op" in place.run("adapter", "list").out
    place.engine.comparison = PASSED
    place.run.good("adapter", "verify", "acme/support@1", *place.base)
    assert "no-op" not in place.run("adapter", "list").out


# ---------------------------------------------------------------------- tenants, keys, audit
def test_tenants_are_made_listed_and_switched(place: Place) -> None:
    place.run.good("tenant", "create", "gamma")
    assert "tenant_exists" in place.run.refused("tenant", "create", "gamma")
    assert "invalid_request" in place.run.refused("tenant", "create", "No Name")
    assert place.run.good("tenant", "disable", "gamma")["disabled_at"] is not None
    assert place.run.good("tenant", "enable", "gamma")["disabled_at"] is None
    names = [one["tenant"] for one in place.run.good("tenant", "list")["tenants"]]
    assert [name for name in names if name != "ops"] == ["acme", "beta", "gamma"]


def test_a_tenants_limits_are_set_one_by_one_shown_and_taken_away(place: Place) -> None:
    none = {"weight": 1.0, "priority": 0, "max_requests": None, "tokens_per_minute": None}
    assert place.run.good("tenant", "limits", "acme")["limits"] == none
    set_ = ("--weight", "2.5", "--priority", "-20", "--max-requests", "8", "--tokens-per-minute", "6000")
    all_ = {"weight": 2.5, "priority": -20, "max_requests": 8, "tokens_per_minute": 6000}
    assert place.run.good("tenant", "limits", "acme", *set_)["limits"] == all_
    view = place.run.good("tenant", "limits", "acme", "--max-requests", "none")
    assert view["limits"] == {**all_, "max_requests": None}
    rows = {line.split()[0]: line.split() for line in place.run("tenant", "list").out.splitlines()}
    assert rows["acme"][-4:] == ["2.5", "-20", "-", "6000"]
    assert rows["beta"][-4:] == ["1", "0", "-", "-"]
    (entry,) = place.run.good("audit", "list", "--tenant", "acme", "--last", "1")["entries"]
    assert (entry["action"], entry["details"]["max_requests_from"]) == ("tenant.limits", 8)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--weight", "0"), "weight is 0.0; it must be from 0.001 to 1000."),
        (("--weight", "nan"), "--weight is nan; it must be a finite number."),
        (("--priority", "101"), "priority is 101; it must be from -100 to 100."),
        (("--max-requests", "0"), "max_requests is 0; it must be from 1 to 1000000."),
        (("--max-requests", "-1"), "--max-requests '-1' is neither a number nor none."),
        (("--tokens-per-minute", "many"), "--tokens-per-minute 'many' is neither a number nor none."),
    ],
)
def test_limits_that_cannot_be_are_refused_in_words(place: Place, words: tuple[str, ...], message: str) -> None:
    assert place.run.refused("tenant", "limits", "acme", *words) == f"error invalid_request: {message}"
    assert place.run.good("tenant", "limits", "acme")["limits"]["weight"] == 1.0


def test_a_key_is_shown_once_alone_on_standard_output(place: Place) -> None:
    ran = place.run("key", "create", "--tenant", "acme", "--role", "tenant_admin", "--expires-in", "90d")
    assert ran.status == 0
    text = ran.out.strip()
    assert len(text.splitlines()) == 1
    principal = place.world.registry.authenticate(text)
    assert (principal.tenant, principal.role) == ("acme", Role.TENANT_ADMIN)
    assert principal.expires_at is not None
    assert text not in ran.err
    listed = place.run("key", "list", "--tenant", "acme")
    assert principal.key_id in listed.out
    assert text not in listed.out
    document = place.run.good("key", "list", "--tenant", "acme")
    assert text not in json.dumps(document)
    place.run.good("key", "revoke", principal.key_id, "--tenant", "acme")
    (key,) = place.run.good("key", "list", "--tenant", "acme")["keys"]
    assert key["revoked_at"] is not None
    assert "key_not_found" in place.run.refused("key", "revoke", "a" * 12, "--tenant", "acme")


def test_a_key_may_be_bound_to_one_adapter(place: Place, tmp_path: Path) -> None:
    place.run.good(*place.add(adapter_dir(tmp_path, 1), "support"))
    created = place.run.good("key", "create", "--tenant", "acme", "--adapter", "support")
    assert created["key"]["bound_adapter"] == "support"
    assert place.world.registry.authenticate(created["api_key"]).bound_adapter == "support"
    assert "model_not_found" in place.run.refused("key", "create", "--tenant", "acme", "--adapter", "other")


@pytest.mark.parametrize("text", ["0d", "90", "d", "1y", "-1d", "1.5h"])
def test_times_are_written_with_a_unit(place: Place, text: str) -> None:
    assert "30m, 12h, 90d or 4w" in place.run.refused("key", "create", "--tenant", "acme", "--expires-in", text)


def test_the_audit_trail_is_listed_and_verified(place: Place) -> None:
    place.run.good("tenant", "disable", "acme")
    entries = place.run.good("audit", "list", "--tenant", "acme")["entries"]
    assert [entry["action"] for entry in entries] == ["tenant.create", "tenant.disable"]
    (last,) = place.run.good("audit", "list", "--tenant", "acme", "--last", "1")["entries"]
    assert last == entries[-1]
    assert place.run("audit", "list", "--tenant", "acme").out.count("tenant.") == 2
    assert place.run.good("audit", "verify")["ok"] is True
    assert place.run("audit", "verify", "--tenant", "acme").out == "The audit log is whole: 2 entries in 1 chains.\n"


def test_a_broken_audit_log_is_status_1(place: Place) -> None:
    heads = place.world.config.data_dir / "audit-heads.jsonl"
    heads.write_text(heads.read_text().replace('"seq":1', '"seq":7', 1))
    ran = place.run("audit", "verify")
    assert ran.status == 1
    assert "BROKEN" in ran.out
    assert "head_forged" in ran.out
    as_json = place.run("audit", "verify", "--json")
    assert (as_json.status, as_json.document["ok"]) == (1, False)


# ---------------------------------------------------------------------- hostile files (RELIABILITY.md, T01)
def test_hostile_directories_are_refused_and_never_run(place: Place, tmp_path: Path) -> None:
    canary, folder = tmp_path / "canary", tmp_path / "hostile"
    folder.mkdir()
    for case in hostile_files(canary):
        (folder / "adapter_config.json").write_bytes(case.config)
        (folder / "adapter_model.safetensors").write_bytes(case.weights)
        line = place.run.refused(*place.add(folder))
        assert not canary.exists(), case.name
        assert line.split()[1].rstrip(":").isupper(), line
    assert leftovers(place.world.config.data_dir) == []


def test_links_pipes_and_pickles_in_a_directory_are_refused(place: Place, tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    good = adapter_dir(tmp_path, 1)
    for case, code in (("link", "PATH_ESCAPE"), ("pipe", "WEIGHTS_MISSING"), ("bin", "WEIGHTS_UNSAFE_FORMAT")):
        folder = tmp_path / case
        folder.mkdir()
        (folder / "adapter_config.json").write_bytes((good / "adapter_config.json").read_bytes())
        weights = folder / "adapter_model.safetensors"
        if case == "link":
            weights.symlink_to(good / "adapter_model.safetensors")
        elif case == "pipe":
            os.mkfifo(weights)
        else:
            (folder / "adapter_model.bin").write_bytes(b"\x80\x02.")
        assert place.run.refused(*place.add(folder)).startswith(f"error {code}: ")
    assert leftovers(place.world.config.data_dir) == []


def test_a_mistyped_source_makes_no_name_and_takes_no_number(place: Place, tmp_path: Path) -> None:
    """The directory is named, whichever of the three is not there."""
    good, empty, half, pickled = adapter_dir(tmp_path, 1), tmp_path / "empty", tmp_path / "half", tmp_path / "pickled"
    for folder in (empty, half, pickled):
        folder.mkdir()
    for folder in (half, pickled):
        (folder / "adapter_config.json").write_bytes((good / "adapter_config.json").read_bytes())
    (pickled / "adapter_model.bin").write_bytes(b"\x80\x02.")
    cases = (
        (tmp_path / "nowhere", "CONFIG_MISSING"),
        (good / "adapter_config.json", "CONFIG_MISSING"),
        (empty, "CONFIG_MISSING"),
        (half, "WEIGHTS_MISSING"),
        (pickled, "WEIGHTS_UNSAFE_FORMAT"),
    )
    for directory, code in cases:
        line = place.run.refused(*place.add(directory))
        assert line.startswith(f"error {code}: "), line
        assert str(directory) in line
    assert place.run.good("adapter", "list", "--deleted")["adapters"] == []
    assert place.run.good(*place.add(good))["version"]["version"] == 1


# ---------------------------------------------------------------------- where
def test_a_command_without_a_place_says_how_to_name_one(run: Commands) -> None:
    line = run.refused("tenant", "list")
    assert "--data-dir DIR" in line
    assert "--url URL" in line


def test_a_command_with_two_places_is_refused(run: Commands, tmp_path: Path) -> None:
    assert "not both" in run.refused("tenant", "list", "--data-dir", tmp_path, "--url", "http://127.0.0.1:1")


def test_options_go_before_the_environment(place: Place, tmp_path: Path) -> None:
    if place.name == "local":
        place.run.good("tenant", "create", "gamma", "--data-dir", tmp_path / "other")
        (tenant,) = place.run.good("tenant", "list", "--data-dir", tmp_path / "other")["tenants"]
        assert tenant["tenant"] == "gamma"
    else:
        ran = place.run("tenant", "list", "--url", "http://127.0.0.1:1")
        assert (ran.status, ran.err.split()[1]) == (3, "server_unreachable:")


COMMANDS = (
    ("tenant", "list"),
    ("tenant", "disable", "acme"),
    ("tenant", "enable", "acme"),
    ("tenant", "limits", "acme"),
    ("key", "create", "--tenant", "acme"),
    ("key", "list", "--tenant", "acme"),
    ("key", "revoke", "a" * 12, "--tenant", "acme"),
    ("audit", "list", "--tenant", "acme"),
    ("audit", "verify"),
    ("adapter", "add", "DIR", "--tenant", "acme", "--name", "a", "--base", "/x", "--base-unverified"),
    ("adapter", "list"),
    ("adapter", "show", "acme/a"),
    ("adapter", "verify", "acme/a@1", "--base", "/x"),
    ("adapter", "activate", "acme/a@1"),
    ("adapter", "rollback", "acme/a"),
    ("adapter", "rm", "acme/a", "-y"),
    ("adapter", "grant", "acme/a", "beta"),
    ("adapter", "revoke", "acme/a", "beta"),
)


def test_every_command_but_one_is_among_those_that_make_no_registry() -> None:
    group: Any = typer.main.get_command(app)
    groups = {name: command.commands for name, command in group.commands.items() if hasattr(command, "commands")}
    known = {(name, inner) for name, commands in groups.items() for inner in commands}
    assert known - {words[:2] for words in COMMANDS} == {("tenant", "create")}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("place_", ["nowhere", "empty", "file", "database"])
def test_a_mistyped_data_directory_is_named_and_nothing_is_made(
    run: Commands, tmp_path: Path, words: tuple[str, ...], place_: str
) -> None:
    data = tmp_path / "data"
    if place_ == "empty":
        data.mkdir()
    elif place_ == "file":
        data.write_text("")
    elif place_ == "database":
        words = (*words, "--database-url", f"sqlite:///{tmp_path}/other.db")
    before = sorted(tmp_path.rglob("*"))
    line = run.refused(*words, "--data-dir", data)
    assert line.startswith(f"error config_error: There is no registry in the data directory {str(data)!r}")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_registry_whose_database_lies_elsewhere_is_found(run: Commands, tmp_path: Path) -> None:
    where = ("--data-dir", tmp_path / "data", "--database-url", f"sqlite:///{tmp_path}/other.db")
    run.good("tenant", "create", "acme", *where)
    assert len(run.good("tenant", "list", *where)["tenants"]) == 1
    assert "has no registry.db" in run.refused("tenant", "list", *where[:2])


def test_a_local_command_wants_the_base_and_a_server_does_not(place: Place, tmp_path: Path) -> None:
    words = ("adapter", "add", adapter_dir(tmp_path), "--tenant", "acme", "--name", "a", "--base-unverified")
    if place.name == "local":
        assert "--base DIR" in place.run.refused(*words)
    else:
        assert "leave out --base" in place.run.refused(*words, "--base", "/x")
        place.run.good(*words)
        assert "leave out --base" in place.run.refused("adapter", "verify", "acme/a", "--base", "/x")
