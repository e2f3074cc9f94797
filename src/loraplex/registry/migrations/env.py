"""What Alembic runs: the revisions, on the connection and in the transaction that it was given."""

from alembic import context

from loraplex.registry.schema import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, transactional_ddl=False)
context.run_migrations()
