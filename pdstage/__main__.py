"""`python -m pdstage`: the command `pdstage`, where its script is not on the path."""

import sys

from pdstage.cli import main

if __name__ == "__main__":  # whoever walks the package's modules imports this one too
    sys.exit(main())
