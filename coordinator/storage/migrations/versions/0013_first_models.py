"""The digest of each federation's first model, so that all models that are kept can be checked"""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("federations", sa.Column("first_sha256", sa.String(64), nullable=True))
    op.execute("UPDATE federations SET first_sha256 = model_sha256 WHERE model_version = 0")


def downgrade() -> None:
    with op.batch_alter_table("federations") as batch:  # SQLite drops no column in place
        batch.drop_column("first_sha256")
