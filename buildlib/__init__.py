"""Model in, container out: no device and no database here."""
