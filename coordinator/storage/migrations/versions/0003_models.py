"""Round, quality and pins of stored global models; removed devices; makers of tokens"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_MAKER = (
    "SELECT {} FROM rounds WHERE rounds.federation_id = models.federation_id "
    "AND rounds.model_version = models.version AND rounds.status = 'closed' ORDER BY rounds.number LIMIT 1"
)


def upgrade() -> None:
    with op.batch_alter_table("models") as models:
        models.add_column(sa.Column("round", sa.Integer(), nullable=True))
        models.add_column(sa.Column("undone", sa.Boolean(), nullable=False, server_default=sa.false()))
        models.add_column(sa.Column("accuracy", sa.Float(), nullable=True))
        models.add_column(sa.Column("loss", sa.Float(), nullable=True))
        models.add_column(sa.Column("pinned_until", sa.Float(), nullable=False, server_default="0"))
    with op.batch_alter_table("devices") as devices:
        devices.add_column(sa.Column("accuracy_alone", sa.Float(), nullable=True))
        # A clause as the default would make SQLite copy the table, which others refer to.
        devices.add_column(sa.Column("removed", sa.Boolean(), nullable=False, server_default="0"))
    with op.batch_alter_table("tokens") as tokens:
        tokens.add_column(sa.Column("made_by", sa.String(16), nullable=True))
    op.execute(f"UPDATE models SET round = ({_MAKER.format('rounds.number')})")
    op.execute(f"UPDATE models SET undone = coalesce(({_MAKER.format('rounds.undone')}), undone)")
    op.execute("UPDATE models SET round = 0 WHERE version = 0 AND round IS NULL")
