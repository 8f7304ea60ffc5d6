"""Results of other tools, read from the files and logs that they document."""
