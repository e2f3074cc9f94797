"""Alembic revisions of the registry's schema. They are run by `registry.database`."""
