"""The virtual Android device: an ADB daemon that the real adb server connects to, and its manager.

`manager` starts, lists, stops and removes devices; `daemon` is the process of one device. Inside
the daemon: `connection` speaks the transport protocol, `services` opens what a client asks for,
`namespace` gives the process an Android-like root folder.
"""
