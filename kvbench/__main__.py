"""`python -m kvbench` is `kvbench`."""

import sys

from kvbench.cli.main import main

sys.exit(main())
