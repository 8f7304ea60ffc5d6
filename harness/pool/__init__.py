"""Who may use which device, and in what state devices are."""
