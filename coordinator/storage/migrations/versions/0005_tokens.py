"""Tokens of operators, rotation of devices' tokens, and an index of what is open"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("note", sa.String(length=200), nullable=False),
        sa.Column("secret_sha256", sa.LargeBinary(length=32), nullable=False),
        sa.Column("federation_id", sa.Integer(), nullable=True),
        sa.Column("max_uses", sa.Integer(), nullable=True),
        sa.Column("uses", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["federation_id"], ["federations.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("secret_sha256"),
    )
    # With a default: SQLite can add such a column in place, and remaking a table that others point at it cannot.
    op.add_column("devices", sa.Column("token_issued_at", sa.Double(), nullable=False, server_default="0"))
    op.add_column("devices", sa.Column("next_token_sha256", sa.LargeBinary(length=32), nullable=True))
    op.execute("UPDATE devices SET token_issued_at = enrolled_at")
    op.create_index("ix_devices_next_token_sha256", "devices", ["next_token_sha256"])
    op.create_index(
        "assignments_open",
        "assignments",
        ["federation_id", "kind"],
        sqlite_where=sa.text("status = 'open'"),
        postgresql_where=sa.text("status = 'open'"),
    )


def downgrade() -> None:
    op.drop_index("assignments_open", table_name="assignments")
    op.drop_index("ix_devices_next_token_sha256", table_name="devices")
    with op.batch_alter_table("devices") as batch:  # SQLite drops no column in place
        batch.drop_column("next_token_sha256")
        batch.drop_column("token_issued_at")
    op.drop_table("tokens")
