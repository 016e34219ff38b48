"""Alembic's environment: apply migrations on the connection of ``database.migrate``."""

from alembic import context

from sparrow.coordinator.storage.tables import Base

# Batch mode: SQLite cannot alter a table in place.
context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
