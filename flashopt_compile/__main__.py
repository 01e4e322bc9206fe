"""`python -m flashopt_compile`: the command `flashopt`."""

import sys

from flashopt_compile.cli import main

if __name__ == "__main__":
    sys.exit(main())
