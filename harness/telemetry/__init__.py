"""What a device does while it works, and making it ready to be measured."""
