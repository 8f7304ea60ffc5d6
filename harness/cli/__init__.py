"""The `qnnfarm` command: one module a noun; other packages add theirs by entry points."""
