"""Plans over hosts: cells are jobs in the PostgreSQL database that holds the results."""
