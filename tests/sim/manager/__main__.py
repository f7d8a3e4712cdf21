"""`python -m tests.sim.manager`: see `run`."""

import sys

from tests.sim.manager.run import main

sys.exit(main())
