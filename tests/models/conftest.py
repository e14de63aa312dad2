"""Lets these tests import their helpers by file name."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
