"""``python -m softline.cli``, which torchrun can start."""

import sys

from softline.cli import main

sys.exit(main())
