"""The global model that each round began from and ended with, and rollback to an older one"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("federations", sa.Column("rollback_version", sa.Integer(), nullable=True))
    op.add_column("rounds", sa.Column("base_version", sa.Integer(), nullable=True))
    op.add_column("rounds", sa.Column("model_version", sa.Integer(), nullable=True))
    op.add_column("rounds", sa.Column("undone", sa.Boolean(), nullable=False, server_default=sa.false()))


def downgrade() -> None:
    with op.batch_alter_table("rounds") as batch:  # SQLite drops no column in place
        batch.drop_column("undone")
        batch.drop_column("model_version")
        batch.drop_column("base_version")
    with op.batch_alter_table("federations") as batch:
        batch.drop_column("rollback_version")
