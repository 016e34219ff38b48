"""All tables"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "deleted_federations",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("deleted_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "federations",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("uid", sa.String(length=32), nullable=False),
        sa.Column("secret", sa.LargeBinary(length=32), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("task", sa.String(length=200), nullable=False),
        sa.Column("method", sa.String(length=64), nullable=False),
        sa.Column("settings", sa.JSON(), nullable=False),
        sa.Column("manifest", sa.Text(), nullable=False),
        sa.Column("replacement", sa.Text(), nullable=True),
        sa.Column("replacement_publication", sa.Text(), nullable=True),
        sa.Column("replacements", sa.Integer(), server_default="0", nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.String(length=32), nullable=True),
        sa.Column("warning", sa.Text(), nullable=True),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("model_version", sa.Integer(), nullable=False),
        sa.Column("rollback_version", sa.Integer(), nullable=True),
        sa.Column("arrivals", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("model_sha256", sa.String(length=64), nullable=False),
        sa.Column("published_bytes", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("published", sa.JSON(), nullable=True),
        sa.Column("noise_key", sa.LargeBinary(length=32), nullable=False),
        sa.Column("publication", sa.Text(), nullable=True),
        sa.Column("publisher", sa.String(length=64), nullable=True),
        sa.Column("publication_sha256", sa.String(length=64), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("name"),
        sa.UniqueConstraint("uid"),
    )
    op.create_table(
        "lease",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.Integer(), server_default="0", nullable=False),
        sa.Column("expires_at", sa.Double(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "deleted_devices",
        sa.Column("token_sha256", sa.LargeBinary(length=32), nullable=False),
        sa.Column("federation_id", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["federation_id"],
            ["deleted_federations.id"],
        ),
        sa.PrimaryKeyConstraint("token_sha256"),
    )
    op.create_table(
        "devices",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("federation_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column(
            "sort_name",
            sa.String(length=160).with_variant(sa.String(length=160, collation="C"), "postgresql"),
            server_default="",
            nullable=False,
        ),
        sa.Column("token_sha256", sa.LargeBinary(length=32), nullable=False),
        sa.Column("token_issued_at", sa.Double(), server_default="0", nullable=False),
        sa.Column("next_token_sha256", sa.LargeBinary(length=32), nullable=True),
        sa.Column("enrolment_key_sha256", sa.LargeBinary(length=32), nullable=False),
        sa.Column("identity_key", sa.String(length=64), nullable=True),
        sa.Column("profile", sa.JSON(), nullable=False),
        sa.Column("budget", sa.Double(), nullable=False),
        sa.Column("limited_by", sa.String(length=16), nullable=True),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("stopped_round", sa.Integer(), nullable=True),
        sa.Column("present", sa.Boolean(), nullable=False),
        sa.Column("paused", sa.String(length=16), nullable=True),
        sa.Column("rest_until", sa.Double(), nullable=False),
        sa.Column("refusals", sa.Integer(), server_default="0", nullable=False),
        sa.Column("failure", sa.JSON(), nullable=True),
        sa.Column("accuracy", sa.Double(), nullable=True),
        sa.Column("seconds", sa.Double(), nullable=True),
        sa.Column("holds_model", sa.Boolean(), nullable=False),
        sa.Column("mask", sa.String(length=64), nullable=True),
        sa.Column("model", sa.String(length=64), nullable=True),
        sa.Column("num_examples", sa.BigInteger(), nullable=True),
        sa.Column("bytes_down", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("bytes_up", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("hosted", sa.Boolean(), server_default=sa.text("0"), nullable=False),
        sa.Column("enrolled_at", sa.Double(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["federation_id"],
            ["federations.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(
        "devices_name_in_use",
        "devices",
        ["federation_id", "name"],
        unique=True,
        sqlite_where=sa.text("status != 'revoked'"),
        postgresql_where=sa.text("status != 'revoked'"),
    )
    op.create_index(op.f("ix_devices_federation_id"), "devices", ["federation_id"], unique=False)
    op.create_index(op.f("ix_devices_next_token_sha256"), "devices", ["next_token_sha256"], unique=False)
    op.create_index(op.f("ix_devices_token_sha256"), "devices", ["token_sha256"], unique=False)
    op.create_table(
        "models",
        sa.Column("federation_id", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("state_sha256", sa.String(length=64), nullable=True),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["federation_id"],
            ["federations.id"],
        ),
        sa.PrimaryKeyConstraint("federation_id", "version"),
    )
    op.create_table(
        "rounds",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("federation_id", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("opened_at", sa.Double(), nullable=False),
        sa.Column("deadline_at", sa.Double(), nullable=False),
        sa.Column("target", sa.Integer(), nullable=False),
        sa.Column("extensions", sa.Integer(), server_default="0", nullable=False),
        sa.Column("closed_at", sa.Double(), nullable=True),
        sa.Column("model_sha256", sa.String(length=64), nullable=True),
        sa.Column("base_version", sa.Integer(), nullable=True),
        sa.Column("model_version", sa.Integer(), nullable=True),
        sa.Column("undone", sa.Boolean(), server_default=sa.text("0"), nullable=False),
        sa.Column("notes", sa.JSON(), nullable=True),
        sa.Column("parts", sa.JSON(), nullable=True),
        sa.Column("secure", sa.JSON(), nullable=True),
        sa.Column("summary", sa.JSON(), nullable=True),
        sa.Column("stale", sa.Boolean(), nullable=False),
        sa.Column("facts", sa.Integer(), server_default="0", nullable=False),
        sa.ForeignKeyConstraint(
            ["federation_id"],
            ["federations.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("federation_id", "number"),
    )
    op.create_index(op.f("ix_rounds_federation_id"), "rounds", ["federation_id"], unique=False)
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
        sa.ForeignKeyConstraint(
            ["federation_id"],
            ["federations.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("secret_sha256"),
    )
    op.create_table(
        "browser_sessions",
        sa.Column("id_sha256", sa.LargeBinary(length=32), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("token_id", sa.String(length=16), nullable=True),
        sa.Column("proof", sa.LargeBinary(length=32), nullable=True),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["token_id"],
            ["tokens.id"],
        ),
        sa.PrimaryKeyConstraint("id_sha256"),
    )
    op.create_table(
        "assignments",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("federation_id", sa.Integer(), nullable=False),
        sa.Column("device_id", sa.String(length=32), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("model_version", sa.Integer(), nullable=False),
        sa.Column("full", sa.Boolean(), nullable=False),
        sa.Column("ratio", sa.Double(), nullable=True),
        sa.Column("draw_key", sa.String(length=32), nullable=True),
        sa.Column("plan", sa.JSON(), nullable=True),
        sa.Column("most_examples", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("deadline_at", sa.Double(), nullable=False),
        sa.Column("update_sha256", sa.String(length=64), nullable=True),
        sa.Column("update_bytes", sa.BigInteger(), nullable=True),
        sa.Column("report", sa.JSON(), nullable=True),
        sa.Column("upload_cost", sa.JSON(), nullable=True),
        sa.Column("return_reason", sa.Text(), nullable=True),
        sa.Column("arrival", sa.BigInteger(), nullable=True),
        sa.Column("counted_round", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(
            ["device_id"],
            ["devices.id"],
        ),
        sa.ForeignKeyConstraint(
            ["federation_id"],
            ["federations.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("federation_id", "round", "device_id", "kind"),
    )
    op.create_index(
        "assignments_arrived",
        "assignments",
        ["federation_id", "counted_round", "arrival"],
        unique=False,
        sqlite_where=sa.text("arrival IS NOT NULL"),
        postgresql_where=sa.text("arrival IS NOT NULL"),
    )
    op.create_index("assignments_of_device", "assignments", ["device_id", "status"], unique=False)
    op.create_index(
        "assignments_open",
        "assignments",
        ["federation_id", "kind"],
        unique=False,
        sqlite_where=sa.text("status = 'open'"),
        postgresql_where=sa.text("status = 'open'"),
    )


def downgrade() -> None:
    op.drop_index(
        "assignments_open",
        table_name="assignments",
        sqlite_where=sa.text("status = 'open'"),
        postgresql_where=sa.text("status = 'open'"),
    )
    op.drop_index("assignments_of_device", table_name="assignments")
    op.drop_index(
        "assignments_arrived",
        table_name="assignments",
        sqlite_where=sa.text("arrival IS NOT NULL"),
        postgresql_where=sa.text("arrival IS NOT NULL"),
    )
    op.drop_table("assignments")
    op.drop_table("browser_sessions")
    op.drop_table("tokens")
    op.drop_index(op.f("ix_rounds_federation_id"), table_name="rounds")
    op.drop_table("rounds")
    op.drop_table("models")
    op.drop_index(op.f("ix_devices_token_sha256"), table_name="devices")
    op.drop_index(op.f("ix_devices_next_token_sha256"), table_name="devices")
    op.drop_index(op.f("ix_devices_federation_id"), table_name="devices")
    op.drop_index(
        "devices_name_in_use",
        table_name="devices",
        sqlite_where=sa.text("status != 'revoked'"),
        postgresql_where=sa.text("status != 'revoked'"),
    )
    op.drop_table("devices")
    op.drop_table("deleted_devices")
    op.drop_table("lease")
    op.drop_table("federations")
    op.drop_table("deleted_federations")
