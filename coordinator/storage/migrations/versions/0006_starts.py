"""Starts of devices, by which copies of a state folder are detected"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("devices", sa.Column("start", sa.String(32), nullable=True))
