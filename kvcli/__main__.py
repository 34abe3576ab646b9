"""`python -m kvcli`."""

from kvcli.cli.app import main

main()
