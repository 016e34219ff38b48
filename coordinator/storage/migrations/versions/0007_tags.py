"""Tags of devices, selections of enrolment tokens, and the number of devices that evaluated a model"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("own_tags", "set_tags", "tags"):
        op.add_column("devices", sa.Column(name, sa.JSON(), nullable=False, server_default="{}"))
    op.add_column("models", sa.Column("devices", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("tokens", sa.Column("where", sa.String(500), nullable=False, server_default=""))
