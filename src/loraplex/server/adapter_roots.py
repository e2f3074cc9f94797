"""Where adapters may be loaded from at run time: directories below roots that the operator of the server named."""

from collections.abc import Sequence
from pathlib import Path

from loraplex.core import ConfigError


def check_roots(roots: Sequence[Path]) -> tuple[Path, ...]:
    """The roots without symbolic links. Raises ConfigError for one that is no directory."""
    for root in roots:
        if not root.is_dir():
            raise ConfigError(f"--lora-root {str(root)!r} is not a directory.")
    return tuple(root.resolve(strict=True) for root in roots)


def find_directory(text: str, roots: Sequence[Path]) -> Path | None:
    """The directory that a client's `lora_path` leads to, if it lies below a root; symbolic links are followed first.

    None for all else, whether there is something or not. Blocks.
    """
    try:
        path = Path(text).resolve(strict=True)
        is_directory = path.is_dir()
    except (OSError, ValueError, RuntimeError):  # not there, too long, a NUL, a loop of links
        return None
    is_below = any(path != root and path.is_relative_to(root) for root in roots)
    return path if is_directory and is_below else None
