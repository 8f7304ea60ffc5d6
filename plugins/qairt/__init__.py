"""The QAIRT SDK: its toolchain, and the layout of its builder's cache."""
