"""The tables. All rows of a tenant carry its id, also where a join could find it.

`TENANT_TABLES` are those whose statements must name the tenant; `tests/registry/test_tenant_predicate.py` holds the
code to it.
"""

from typing import Any, TypeAlias

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    Row,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from loraplex.registry.limits import MAX_FAILURE_CHARS

AnyRow: TypeAlias = Row[*tuple[Any, ...]]

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def _name() -> String:
    """A name that sorts by code point in every database."""
    return String(64).with_variant(String(64, collation="C"), "postgresql")


def _hash() -> String:
    return String(64)


def _id() -> String:
    return String(32)


epoch = Table(
    "epoch",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("value", BigInteger, nullable=False),
    CheckConstraint("id = 1", name="one_row"),
)

meta = Table(
    "meta",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("value", String(128), nullable=False),
)

tenants = Table(
    "tenants",
    metadata,
    Column("tenant_id", _id(), primary_key=True),
    Column("name", _name(), nullable=False, unique=True),
    Column("created_at", Double, nullable=False),
    Column("disabled_at", Double),
    Column("epoch", BigInteger, nullable=False, index=True),
    Column("weight", Double, nullable=False, server_default="1"),
    Column("priority", Integer, nullable=False, server_default="0"),
    Column("max_requests", Integer),
    Column("tokens_per_minute", BigInteger),
)

adapters = Table(
    "adapters",
    metadata,
    Column("adapter_id", _id(), primary_key=True),
    Column("tenant_id", _id(), ForeignKey("tenants.tenant_id"), nullable=False),
    Column("name", _name(), nullable=False),
    Column("next_number", Integer, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("deleted_at", Double),
    Column("life", Integer, nullable=False, server_default="1"),  # one more each time it is published after deletion
    UniqueConstraint("tenant_id", "name"),
    UniqueConstraint("tenant_id", "adapter_id"),
)

versions = Table(
    "versions",
    metadata,
    Column("adapter_id", _id(), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("tenant_id", _id(), nullable=False),
    Column("state", String(16), nullable=False),
    Column("refusal", String(64)),
    Column("base_fingerprint", _hash(), nullable=False),
    Column("base_verified", Boolean(create_constraint=False), nullable=False),
    Column("base_override_by", String(16)),
    Column("digest", _hash()),
    Column("max_rank", Integer),
    Column("num_bytes", BigInteger),
    Column("targets", Text),  # names joined by commas
    Column("declared_base", Text),
    Column("names_base", Boolean(create_constraint=False)),
    Column("config_key", _hash(), index=True),
    Column("config_bytes", BigInteger),
    Column("weights_key", _hash(), index=True),
    Column("weights_bytes", BigInteger),
    Column("created_at", Double, nullable=False),
    Column("created_by", String(16), nullable=False),
    ForeignKeyConstraint(["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.adapter_id"]),
)

aliases = Table(
    "aliases",
    metadata,
    Column("adapter_id", _id(), primary_key=True),
    Column("tenant_id", _id(), nullable=False),
    Column("active_number", Integer),
    Column("revision", Integer, nullable=False),
    ForeignKeyConstraint(["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.adapter_id"]),
    ForeignKeyConstraint(["adapter_id", "active_number"], ["versions.adapter_id", "versions.number"]),
)

alias_moves = Table(
    "alias_moves",
    metadata,
    Column("adapter_id", _id(), primary_key=True),
    Column("revision", Integer, primary_key=True, autoincrement=False),
    Column("tenant_id", _id(), nullable=False),
    Column("action", String(16), nullable=False),
    Column("from_number", Integer),
    Column("to_number", Integer),
    Column("at", Double, nullable=False),
    Column("by", String(16), nullable=False),
    ForeignKeyConstraint(["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.adapter_id"]),
)

verifications = Table(
    "verifications",
    metadata,
    Column("adapter_id", _id(), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("tenant_id", _id(), nullable=False),
    Column("skipped", Boolean(create_constraint=False), nullable=False),
    Column("passed", Boolean(create_constraint=False)),
    Column("max_logit_difference", Double),
    Column("kl", Double),
    Column("effect", Double),
    Column("tolerance", Double),
    Column("failure", String(MAX_FAILURE_CHARS)),
    Column("at", Double, nullable=False),
    Column("by", String(16), nullable=False),
    ForeignKeyConstraint(["adapter_id", "number"], ["versions.adapter_id", "versions.number"]),
)

tombstones = Table(
    "tombstones",
    metadata,
    Column("adapter_id", _id(), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("tenant_id", _id(), nullable=False),
    Column("digest", _hash()),
    Column("at", Double, nullable=False),
    Column("by", String(16), nullable=False),
    ForeignKeyConstraint(["adapter_id", "number"], ["versions.adapter_id", "versions.number"]),
)

grants = Table(
    "grants",
    metadata,
    Column("adapter_id", _id(), primary_key=True),
    Column("grantee_id", _id(), ForeignKey("tenants.tenant_id"), primary_key=True, index=True),
    Column("tenant_id", _id(), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("created_by", String(16), nullable=False),
    ForeignKeyConstraint(["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.adapter_id"]),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("key_id", String(16), primary_key=True),
    Column("tenant_id", _id(), ForeignKey("tenants.tenant_id"), nullable=False, index=True),
    Column("secret_hash", _hash(), nullable=False),
    Column("role", String(16), nullable=False),
    Column("bound_adapter_id", _id(), ForeignKey("adapters.adapter_id")),
    Column("bound_life", Integer),  # the adapter's when it was bound
    Column("created_at", Double, nullable=False),
    Column("created_by", String(16), nullable=False),
    Column("expires_at", Double),
    Column("revoked_at", Double),
)

audit_log = Table(
    "audit_log",
    metadata,
    Column("chain", _id(), primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("body", Text, nullable=False),
    Column("mac", _hash(), nullable=False),
)

Index("ix_versions_tenant_id_digest", versions.c.tenant_id, versions.c.digest)

TENANT_TABLES = frozenset(
    {adapters, versions, aliases, alias_moves, verifications, tombstones, grants, api_keys},
)
