"""The coordinator's storage: records in a database, models and updates as blobs."""
