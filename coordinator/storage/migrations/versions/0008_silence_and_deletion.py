"""Devices whose silence means nothing, how a federation was published, and federations that were deleted"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("devices", sa.Column("hosted", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("federations", sa.Column("published", sa.JSON(), nullable=True))
    op.create_table(
        "deleted_federations",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("deleted_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "deleted_devices",
        sa.Column("token_sha256", sa.LargeBinary(32), nullable=False),
        sa.Column("federation_id", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["federation_id"], ["deleted_federations.id"]),
        sa.PrimaryKeyConstraint("token_sha256"),
    )


def downgrade() -> None:
    op.drop_table("deleted_devices")
    op.drop_table("deleted_federations")
    with op.batch_alter_table("federations") as batch:  # SQLite drops no column in place
        batch.drop_column("published")
    with op.batch_alter_table("devices") as batch:
        batch.drop_column("hosted")
