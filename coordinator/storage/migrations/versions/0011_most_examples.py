"""The largest weight of each update"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("assignments", sa.Column("most_examples", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("assignments") as batch:  # SQLite drops no column in place
        batch.drop_column("most_examples")
