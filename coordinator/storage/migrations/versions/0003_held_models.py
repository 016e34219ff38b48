"""The global model that a device can rebuild: it is sent what changed since"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("devices", sa.Column("model", sa.String(length=64), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("devices") as batch:  # SQLite drops no column in place
        batch.drop_column("model")
