"""`python -m cotenant.ui.cli`: the same as the `cotenant` command."""

import sys

from cotenant.ui.cli import main

if __name__ == "__main__":
    sys.exit(main())
