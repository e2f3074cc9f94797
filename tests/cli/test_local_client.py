"""Adding an adapter on a data directory with the real engine, and what the real base says."""

from pathlib import Path

from tests.conftest import MakeAdapter, MakeBase

from .places import Commands


def test_an_adapter_is_checked_and_compared_on_the_real_base(
    run: Commands, tiny_base: MakeBase, tiny_adapter: MakeAdapter, tmp_path: Path
) -> None:
    base = tiny_base("llama")
    adapter = tiny_adapter(base)
    place = ("--data-dir", tmp_path / "data")
    fingerprint = run("fingerprint", base).out.strip()
    run.good("tenant", "create", "acme", *place)
    words = ("--tenant", "acme", "--name", "support", "--base", base, "--base-fingerprint", fingerprint)
    added = run.good("adapter", "add", adapter, *words, "--activate", *place)
    assert (added["version"]["state"], added["alias"]["active"]) == ("verified", 1)
    assert added["version"]["base_fingerprint"] == fingerprint
    verification = added["verification"]
    assert 0 <= verification["max_logit_difference"] <= verification["tolerance"] < verification["effect"]
    other = ("--base", tiny_base("llama", seed=1))
    assert "BASE_MISMATCH" in run.refused("adapter", "add", adapter, *words[:4], *other, *words[6:], *place)
    assert "wrong_base" in run.refused("adapter", "verify", "acme/support@1", *other, *place)
    assert "ARCHITECTURE_UNSUPPORTED" in run.refused(
        "adapter", "verify", "acme/support", "--base", _no_base(tmp_path), *place
    )


def _no_base(folder: Path) -> Path:
    directory = folder / "no-base"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory
