"""The adb server and its protocol, and Android devices behind one."""
