"""A secret of each federation, from which its draws follow"""

import secrets

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("federations", sa.Column("secret", sa.LargeBinary(32), nullable=True))
    federations = sa.table("federations", sa.column("id", sa.Integer), sa.column("secret", sa.LargeBinary))
    connection = op.get_bind()
    for (federation,) in connection.execute(sa.select(federations.c.id)).all():
        of_it = sa.update(federations).where(federations.c.id == federation)
        connection.execute(of_it.values(secret=secrets.token_bytes(32)))


def downgrade() -> None:
    with op.batch_alter_table("federations") as batch:  # SQLite drops no column in place
        batch.drop_column("secret")
