"""Events of federations, for the timeline"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "events",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("federation_id", sa.Integer(), sa.ForeignKey("federations.id"), nullable=False),
        sa.Column("kind", sa.String(24), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("device", sa.String(64), nullable=True),
        sa.Column("detail", sa.Text(), nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("events_of_federation", "events", ["federation_id", "id"])
