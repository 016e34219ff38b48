"""The keys that the noise of private federations follows from"""

import secrets

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("federations", sa.Column("noise_key", sa.LargeBinary(32)))
    connection = op.get_bind()
    for number in connection.scalars(sa.text("SELECT id FROM federations")).all():
        filled = sa.text("UPDATE federations SET noise_key = :key WHERE id = :id")
        connection.execute(filled, {"key": secrets.token_bytes(32), "id": number})
    with op.batch_alter_table("federations") as batch:
        batch.alter_column("noise_key", existing_type=sa.LargeBinary(32), nullable=False)


def downgrade() -> None:
    with op.batch_alter_table("federations") as batch:  # SQLite drops no column in place
        batch.drop_column("noise_key")
