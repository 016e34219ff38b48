"""All that devices move, and what a publication took"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

COLUMNS = (("devices", "bytes_down"), ("devices", "bytes_up"), ("federations", "published_bytes"))


def upgrade() -> None:
    for table, column in COLUMNS:
        op.add_column(table, sa.Column(column, sa.BigInteger(), nullable=False, server_default="0"))


def downgrade() -> None:
    for table, column in COLUMNS:
        with op.batch_alter_table(table) as batch:  # SQLite drops no column in place
            batch.drop_column(column)
