"""The tables of the first release

``database.migrate`` creates the tables of a new database from ``tables.py`` and marks them with the newest revision, so
this revision is empty.
"""

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    pass
