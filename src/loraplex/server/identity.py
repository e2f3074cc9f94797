"""How answers and log lines say which weights a request has."""

from dataclasses import dataclass
from urllib.parse import quote

from loraplex.core import ServedBy


@dataclass(slots=True, eq=False)
class Target:
    """What a request of an administrator is about; None is what the request does not say or did not find out."""

    tenant: str | None = None
    adapter: str | None = None
    version: int | None = None
    digest: str | None = None


def identity_headers(served: ServedBy) -> dict[str, str]:
    """`x-loraplex-adapter` and `x-loraplex-base`. Names are percent-encoded where a header could not carry them."""
    adapter = served.adapter
    label = "none"
    if adapter is not None:
        label = f"name={quote(adapter.name, safe='/@:+')}; version={adapter.version}; digest={adapter.digest}"
    return {"x-loraplex-adapter": label, "x-loraplex-base": served.base_fingerprint}
