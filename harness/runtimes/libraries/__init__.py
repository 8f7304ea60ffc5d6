"""Sources of Genie's libraries: the installed wheel, a fetched wheel, or an SDK."""
