"""A name that is published after its deletion has a new life: keys are bound to one life, and no grant outlives it.

A failed comparison says what was wrong beside its figures.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("adapters", sa.Column("life", sa.Integer, nullable=False, server_default="1"))
    op.add_column("api_keys", sa.Column("bound_life", sa.Integer))
    op.add_column("versions", sa.Column("names_base", sa.Boolean))
    op.add_column("verifications", sa.Column("failure", sa.String(300)))
    op.execute("UPDATE api_keys SET bound_life = 1 WHERE bound_adapter_id IS NOT NULL")
    deleted = "SELECT adapter_id FROM adapters WHERE deleted_at IS NOT NULL"
    op.execute(f"DELETE FROM grants WHERE adapter_id IN ({deleted})")  # noqa: S608  (no text of others)


def downgrade() -> None:
    op.drop_column("verifications", "failure")
    op.drop_column("versions", "names_base")
    op.drop_column("api_keys", "bound_life")
    op.drop_column("adapters", "life")
