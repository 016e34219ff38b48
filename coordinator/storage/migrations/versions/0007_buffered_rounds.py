"""The number of updates that close a round, and the round in which a late update counts"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

ARRIVED = sa.text("arrival IS NOT NULL")
# What closed a round before: all of its cohort. (A quorum that was set comes into force with the next round.)
TARGET = """
    UPDATE rounds SET target = (
        SELECT count(*) FROM assignments
        WHERE assignments.federation_id = rounds.federation_id AND assignments.round = rounds.number
            AND assignments.kind IN ('train', 'personalise', 'prepare')
    )
"""


def upgrade() -> None:
    op.add_column("federations", sa.Column("arrivals", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("rounds", sa.Column("target", sa.Integer(), nullable=True))
    op.add_column("rounds", sa.Column("extensions", sa.Integer(), nullable=False, server_default="0"))
    op.execute(TARGET)
    with op.batch_alter_table("rounds") as batch:
        batch.alter_column("target", existing_type=sa.Integer(), nullable=False)
    op.add_column("assignments", sa.Column("arrival", sa.BigInteger(), nullable=True))
    op.add_column("assignments", sa.Column("counted_round", sa.Integer(), nullable=True))
    op.create_index(
        "assignments_arrived",
        "assignments",
        ["federation_id", "counted_round", "arrival"],
        sqlite_where=ARRIVED,
        postgresql_where=ARRIVED,
    )


def downgrade() -> None:
    op.drop_index("assignments_arrived", "assignments")
    with op.batch_alter_table("assignments") as batch:  # SQLite drops no column in place
        batch.drop_column("counted_round")
        batch.drop_column("arrival")
    with op.batch_alter_table("rounds") as batch:
        batch.drop_column("extensions")
        batch.drop_column("target")
    with op.batch_alter_table("federations") as batch:
        batch.drop_column("arrivals")
