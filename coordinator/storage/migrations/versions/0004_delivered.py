"""The last event that the webhook has delivered"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "delivered",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("event_id", sa.Integer(), nullable=False),
    )
