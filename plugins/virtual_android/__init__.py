"""The virtual Android device: an ADB daemon that the real adb server connects to, and its manager.

On the host's side, `manager` starts, lists, stops and removes devices, `host` runs many in few
processes, `control` commands a running one. `daemon` is the process of one device. Inside it:
`device` boots and serves, `connection` and `stream` speak the transport protocol, `services` opens
services by name (`shell`, `sync`), `injection` holds the faults, `heat` models temperatures.
"""
