"""`python -m minibatcher` is the same as the command `minibatcher`."""

import sys

from .cli import main

sys.exit(main())
