"""One device's conversation with a coordinator, and what it keeps."""
