"""`loraplex import-gguf`: turn a GGUF file into a directory that `serve` takes."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from loraplex.cli.progress import progress_bar
from loraplex.cli.say import say


def import_gguf(
    gguf: Annotated[Path, typer.Argument(help="GGUF file of a Llama, Mistral, Qwen2 or Qwen3 model.")],
    out: Annotated[Path, typer.Argument(help="Directory to write: config, bfloat16 safetensors, tokenizer.")],
) -> None:
    """Convert a GGUF file to a Hugging Face directory in bfloat16.

    Needs the extra `gguf`: pip install 'loraplex[gguf]'.
    """
    from loraplex.model.gguf_import import import_gguf as convert

    console = Console(stderr=True)
    with progress_bar(console, "Converting") as progress:
        convert(gguf, out, progress)
    say(console, f"Wrote {out}")
