"""The results store: runs and their measurements, in SQLite or a database server."""
