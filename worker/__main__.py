"""`python -m worker` is agentctl."""

import sys

from worker.cli import main

sys.exit(main(sys.argv[1:]))
