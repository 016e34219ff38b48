"""The global models that were committed, the lease of the process that moves rounds, and a count of a round's facts"""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "models",
        sa.Column("federation_id", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("state_sha256", sa.String(length=64), nullable=True),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["federation_id"], ["federations.id"]),
        sa.PrimaryKeyConstraint("federation_id", "version"),
    )
    op.create_table(
        "lease",
        sa.Column("id", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("epoch", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("expires_at", sa.Double(), nullable=False, server_default="0"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.add_column("rounds", sa.Column("facts", sa.Integer(), nullable=False, server_default="0"))


def downgrade() -> None:
    with op.batch_alter_table("rounds") as batch:  # SQLite drops no column in place
        batch.drop_column("facts")
    op.drop_table("lease")
    op.drop_table("models")
