"""``python -m managedmem``: run the commands of ``_cli``."""

import sys

from managedmem._cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
