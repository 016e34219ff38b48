"""The limit of a device's budget, and why its policy keeps it away"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("devices", sa.Column("limited_by", sa.String(length=16), nullable=True))
    op.add_column("devices", sa.Column("paused", sa.String(length=16), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("devices") as batch:  # SQLite drops no column in place
        batch.drop_column("paused")
        batch.drop_column("limited_by")
