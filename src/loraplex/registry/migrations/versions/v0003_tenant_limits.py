"""Operators set a tenant's part of each server: its weight, its first priority, and two bounds."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tenants", sa.Column("weight", sa.Double, nullable=False, server_default="1"))
    op.add_column("tenants", sa.Column("priority", sa.Integer, nullable=False, server_default="0"))
    op.add_column("tenants", sa.Column("max_requests", sa.Integer))
    op.add_column("tenants", sa.Column("tokens_per_minute", sa.BigInteger))


def downgrade() -> None:
    for column in ("tokens_per_minute", "max_requests", "priority", "weight"):
        op.drop_column("tenants", column)
