"""Sparse global models: what devices hold of masks, what a round asks and what it came to"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

COLUMNS = (
    ("federations", sa.Column("warning", sa.Text(), nullable=True)),
    ("devices", sa.Column("mask", sa.String(length=64), nullable=True)),
    ("devices", sa.Column("num_examples", sa.BigInteger(), nullable=True)),
    ("rounds", sa.Column("notes", sa.JSON(), nullable=True)),
    ("rounds", sa.Column("parts", sa.JSON(), nullable=True)),
    ("assignments", sa.Column("plan", sa.JSON(), nullable=True)),
)


def upgrade() -> None:
    for table, column in COLUMNS:
        op.add_column(table, column)


def downgrade() -> None:
    for table, column in reversed(COLUMNS):
        with op.batch_alter_table(table) as batch:  # SQLite drops no column in place
            batch.drop_column(column.name)
