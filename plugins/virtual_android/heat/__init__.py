"""Heat model of a device: temperatures, sysfs files, throttling."""
