"""What of a pool could be freed, as the tests count it."""

from loraplex.pool import AdapterResidency, AdapterState


def num_idle_pages(residency: AdapterResidency) -> int:
    """Pages of resident adapters that nobody uses and nobody pinned."""
    return sum(
        place.num_pages
        for digest, place in residency.placements(0.0).items()
        if place.state is AdapterState.RESIDENT and not place.num_users and not residency.is_pinned(digest)
    )
