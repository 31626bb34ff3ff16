"""``python -m hostir`` is the command ``hostir``."""

from __future__ import annotations

import sys

from hostir.cli import main

sys.exit(main())
