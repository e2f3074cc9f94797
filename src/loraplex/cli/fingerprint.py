"""`loraplex fingerprint`: the identity of a base, which adapters declare and every answer names."""

import json
from pathlib import Path
from typing import Annotated

import typer

_Json = typer.Option("--json", help="Print one JSON object: fingerprint, directory, model_type, tensors, bytes.")


def fingerprint(
    base: Annotated[Path, typer.Argument(help="Hugging Face directory of the base model.")],
    as_json: Annotated[bool, _Json] = False,
) -> None:
    """Print the fingerprint of a base: sha256 over the name, type, shape and data of every tensor.

    Hashes on all cores, and keeps the result beside the weights for as long as these very files stay.
    """
    from loraplex.model import base_fingerprint, open_checkpoint

    config, checkpoint = open_checkpoint(base)
    value = base_fingerprint(checkpoint)
    if not as_json:
        typer.echo(value)
        return
    num_bytes = sum(shard.stat().st_size for shard in checkpoint.shards)
    found = {
        "fingerprint": value,
        "directory": str(base),
        "model_type": config.model_type,
        "tensors": len(checkpoint.names),
        "bytes": num_bytes,
    }
    typer.echo(json.dumps(found))
