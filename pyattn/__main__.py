"""``python -m pyattn``: the same as the console script ``pyattn``."""

import sys

from pyattn.cli import main

sys.exit(main())
