"""``python -m softline.cli``, for torchrun and other launchers of modules."""

import sys

from softline.cli import main

sys.exit(main())
