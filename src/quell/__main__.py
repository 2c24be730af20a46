"""`python -m quell` is the command `quell`."""

from quell.cli import main

main()
