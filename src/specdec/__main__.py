"""`python -m specdec` is the `specdec` command."""

from specdec.core.cli import main

main()
