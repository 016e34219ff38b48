"""What the coordinator keeps: records in a database, models and updates as blobs in a folder."""
