"""The room stays light."""

import subprocess
import sys

import loraplex.adapters


def test_torch_and_trainers_are_not_imported() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'peft'):\n"
        "    sys.modules[name] = None\n"
        "import loraplex.adapters\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_exported_names_are_sorted() -> None:
    assert loraplex.adapters.__all__ == sorted(loraplex.adapters.__all__)
    assert all(hasattr(loraplex.adapters, name) for name in loraplex.adapters.__all__)
