"""A model of heat: what the device's work warms, what its files show of it, what it slows down."""
