"""Whether a device has exported its model"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Not in batch mode: a copy of the table would break the references to it.
    op.add_column("devices", sa.Column("exported", sa.Boolean(), nullable=False, server_default=sa.false()))
