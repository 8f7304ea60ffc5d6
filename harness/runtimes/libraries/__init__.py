"""Where Genie for a device comes from: the installed wheel, one that was fetched, or an SDK."""
