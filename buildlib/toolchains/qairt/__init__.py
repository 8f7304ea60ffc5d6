"""Toolchain of the QAIRT SDK: the vendor's programs, by their documented command lines."""
