"""The command line: several values of one option, and errors as one line."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loraplex.cli.main import app, spread_values


def test_several_values_become_repeated_options() -> None:
    assert spread_values(["serve", "base", "--lora-modules", "a=1", "b=2", "c=3"]) == [
        "serve",
        "base",
        *("--lora-modules", "a=1", "--lora-modules", "b=2", "--lora-modules", "c=3"),
    ]


def test_repeated_options_stay() -> None:
    argv = ["serve", "base", "--lora-modules", "a=1", "--lora-modules", "b=2"]
    assert spread_values(argv) == argv


def test_the_next_option_ends_the_values() -> None:
    argv = ["serve", "base", "--lora-modules", "a=1", "--port", "80", "extra"]
    assert spread_values(argv) == argv


def test_values_after_another_option_go_on_with_the_option_given_again() -> None:
    argv = ["--lora-modules", "a=1", "b=2", "--port", "80", "--lora-modules", "c=3", "d=4"]
    assert spread_values(argv) == [
        *("--lora-modules", "a=1", "--lora-modules", "b=2"),
        *("--port", "80"),
        *("--lora-modules", "c=3", "--lora-modules", "d=4"),
    ]


@pytest.mark.parametrize("argv", [[], ["demo"], ["serve", "base", "--host", "x"], ["serve", "--lora-modules"]])
def test_other_command_lines_stay_as_they_are(argv: list[str]) -> None:
    assert spread_values(argv) == argv


def run_loraplex(*argv: str) -> subprocess.CompletedProcess[str]:
    code = "from loraplex.cli.main import main; main()"
    return subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serve", "base", "--max-loras", "0"], "'--max-loras': Input should be greater than or equal to 1, got '0'"),
        (["serve", "base", "--port", "65536"], "'--port': Input should be less than or equal to 65535, got '65536'"),
        (["serve", "base", "--preload-recent", "many"], "unable to parse string as an integer, got 'many'"),
        (["audit", "list", "--last", "0"], "'--last': Input should be greater than or equal to 1, got '0'"),
    ],
)
def test_a_refused_value_is_named_with_its_limit_and_flag(argv: list[str], words: str) -> None:
    result = CliRunner().invoke(app, argv)
    assert result.exit_code == 2
    assert words in " ".join(result.output.replace("│", " ").split())


def test_a_bad_base_is_one_line_on_stderr_and_status_2(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    done = run_loraplex("serve", str(tmp_path), "--port", "0")
    assert done.returncode == 2
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error ARCHITECTURE_UNSUPPORTED: config.json: model_type None")


def test_a_bad_setting_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    done = run_loraplex("serve", str(tmp_path / "nowhere"), "--memory", "lots")
    assert done.returncode == 2
    assert done.stderr == "error config_error: --memory 'lots' is not a size; write for example 512M or 2G.\n"


def test_a_taken_port_is_found_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run_loraplex("serve", str(tmp_path / "nowhere"), "--port", str(port))
    assert done.returncode == 2
    line = f"error config_error: Port {port} of 127.0.0.1 is taken; choose another (--port, 0 takes a free one).\n"
    assert done.stderr == line


def test_import_without_the_extra_says_how_to_install_it(tmp_path: Path) -> None:
    code = "import sys; sys.modules['gguf'] = None; from loraplex.cli.main import main; main()"
    command = [sys.executable, "-c", code, "import-gguf", str(tmp_path / "model.gguf"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "pip install 'loraplex[gguf]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1
