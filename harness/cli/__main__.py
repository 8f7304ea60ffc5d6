"""`python -m harness.cli`: the command without its launcher."""

from harness.cli.app import main

main()
