"""The first schema: tenants, keys, adapters with versions and pointers, and the audit log."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    _create_singletons()
    _create_owners()
    _create_versions()
    _create_histories()
    _create_access()


def downgrade() -> None:
    for table in (
        "api_keys",
        "grants",
        "tombstones",
        "verifications",
        "alias_moves",
        "aliases",
        "versions",
        "adapters",
        "tenants",
        "meta",
        "epoch",
        "audit_log",
    ):
        op.drop_table(table)


def _name() -> sa.String:
    return sa.String(64).with_variant(sa.String(64, collation="C"), "postgresql")


def _text(name: str, length: int, nullable: bool = False) -> "sa.Column[str]":
    return sa.Column(name, sa.String(length), nullable=nullable)


def _adapter_reference(table: str) -> sa.ForeignKeyConstraint:
    columns = ["tenant_id", "adapter_id"]
    targets = ["adapters.tenant_id", "adapters.adapter_id"]
    return sa.ForeignKeyConstraint(columns, targets, name=f"fk_{table}_tenant_id_adapter_id")


def _version_reference(table: str, column: str = "number") -> sa.ForeignKeyConstraint:
    targets = ["versions.adapter_id", "versions.number"]
    return sa.ForeignKeyConstraint(["adapter_id", column], targets, name=f"fk_{table}_adapter_id_{column}")


def _create_singletons() -> None:
    epoch = op.create_table(
        "epoch",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("value", sa.BigInteger, nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_epoch_one_row")),
        sa.PrimaryKeyConstraint("id", name="pk_epoch"),
    )
    op.bulk_insert(epoch, [{"id": 1, "value": 1}])
    op.create_table("meta", _text("name", 64), _text("value", 128), sa.PrimaryKeyConstraint("name", name="pk_meta"))
    op.create_table(
        "audit_log",
        _text("chain", 32),
        sa.Column("seq", sa.BigInteger, nullable=False, autoincrement=False),
        sa.Column("body", sa.Text, nullable=False),
        _text("mac", 64),
        sa.PrimaryKeyConstraint("chain", "seq", name="pk_audit_log"),
    )


def _create_owners() -> None:
    op.create_table(
        "tenants",
        _text("tenant_id", 32),
        sa.Column("name", _name(), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("disabled_at", sa.Double),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", name="pk_tenants"),
        sa.UniqueConstraint("name", name="uq_tenants_name"),
    )
    op.create_index("ix_tenants_epoch", "tenants", ["epoch"])
    op.create_table(
        "adapters",
        _text("adapter_id", 32),
        _text("tenant_id", 32),
        sa.Column("name", _name(), nullable=False),
        sa.Column("next_number", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("deleted_at", sa.Double),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.tenant_id"], name="fk_adapters_tenant_id"),
        sa.PrimaryKeyConstraint("adapter_id", name="pk_adapters"),
        sa.UniqueConstraint("tenant_id", "adapter_id", name="uq_adapters_tenant_id_adapter_id"),
        sa.UniqueConstraint("tenant_id", "name", name="uq_adapters_tenant_id_name"),
    )


def _create_versions() -> None:
    op.create_table(
        "versions",
        _text("adapter_id", 32),
        sa.Column("number", sa.Integer, nullable=False, autoincrement=False),
        _text("tenant_id", 32),
        _text("state", 16),
        _text("refusal", 64, nullable=True),
        _text("base_fingerprint", 64),
        sa.Column("base_verified", sa.Boolean, nullable=False),
        _text("base_override_by", 16, nullable=True),
        _text("digest", 64, nullable=True),
        sa.Column("max_rank", sa.Integer),
        sa.Column("num_bytes", sa.BigInteger),
        sa.Column("targets", sa.Text),
        sa.Column("declared_base", sa.Text),
        _text("config_key", 64, nullable=True),
        sa.Column("config_bytes", sa.BigInteger),
        _text("weights_key", 64, nullable=True),
        sa.Column("weights_bytes", sa.BigInteger),
        sa.Column("created_at", sa.Double, nullable=False),
        _text("created_by", 16),
        _adapter_reference("versions"),
        sa.PrimaryKeyConstraint("adapter_id", "number", name="pk_versions"),
    )
    op.create_index("ix_versions_config_key", "versions", ["config_key"])
    op.create_index("ix_versions_weights_key", "versions", ["weights_key"])
    op.create_index("ix_versions_tenant_id_digest", "versions", ["tenant_id", "digest"])
    op.create_table(
        "aliases",
        _text("adapter_id", 32),
        _text("tenant_id", 32),
        sa.Column("active_number", sa.Integer),
        sa.Column("revision", sa.Integer, nullable=False),
        _adapter_reference("aliases"),
        _version_reference("aliases", "active_number"),
        sa.PrimaryKeyConstraint("adapter_id", name="pk_aliases"),
    )


def _create_histories() -> None:
    op.create_table(
        "alias_moves",
        _text("adapter_id", 32),
        sa.Column("revision", sa.Integer, nullable=False, autoincrement=False),
        _text("tenant_id", 32),
        _text("action", 16),
        sa.Column("from_number", sa.Integer),
        sa.Column("to_number", sa.Integer),
        sa.Column("at", sa.Double, nullable=False),
        _text("by", 16),
        _adapter_reference("alias_moves"),
        sa.PrimaryKeyConstraint("adapter_id", "revision", name="pk_alias_moves"),
    )
    op.create_table(
        "verifications",
        _text("adapter_id", 32),
        sa.Column("number", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("attempt", sa.Integer, nullable=False, autoincrement=False),
        _text("tenant_id", 32),
        sa.Column("skipped", sa.Boolean, nullable=False),
        sa.Column("passed", sa.Boolean),
        sa.Column("max_logit_difference", sa.Double),
        sa.Column("kl", sa.Double),
        sa.Column("effect", sa.Double),
        sa.Column("tolerance", sa.Double),
        sa.Column("at", sa.Double, nullable=False),
        _text("by", 16),
        _version_reference("verifications"),
        sa.PrimaryKeyConstraint("adapter_id", "number", "attempt", name="pk_verifications"),
    )
    op.create_table(
        "tombstones",
        _text("adapter_id", 32),
        sa.Column("number", sa.Integer, nullable=False, autoincrement=False),
        _text("tenant_id", 32),
        _text("digest", 64, nullable=True),
        sa.Column("at", sa.Double, nullable=False),
        _text("by", 16),
        _version_reference("tombstones"),
        sa.PrimaryKeyConstraint("adapter_id", "number", name="pk_tombstones"),
    )


def _create_access() -> None:
    op.create_table(
        "grants",
        _text("adapter_id", 32),
        _text("grantee_id", 32),
        _text("tenant_id", 32),
        sa.Column("created_at", sa.Double, nullable=False),
        _text("created_by", 16),
        _adapter_reference("grants"),
        sa.ForeignKeyConstraint(["grantee_id"], ["tenants.tenant_id"], name="fk_grants_grantee_id"),
        sa.PrimaryKeyConstraint("adapter_id", "grantee_id", name="pk_grants"),
    )
    op.create_index("ix_grants_grantee_id", "grants", ["grantee_id"])
    op.create_table(
        "api_keys",
        _text("key_id", 16),
        _text("tenant_id", 32),
        _text("secret_hash", 64),
        _text("role", 16),
        _text("bound_adapter_id", 32, nullable=True),
        sa.Column("created_at", sa.Double, nullable=False),
        _text("created_by", 16),
        sa.Column("expires_at", sa.Double),
        sa.Column("revoked_at", sa.Double),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.tenant_id"], name="fk_api_keys_tenant_id"),
        sa.ForeignKeyConstraint(["bound_adapter_id"], ["adapters.adapter_id"], name="fk_api_keys_bound_adapter_id"),
        sa.PrimaryKeyConstraint("key_id", name="pk_api_keys"),
    )
    op.create_index("ix_api_keys_tenant_id", "api_keys", ["tenant_id"])
