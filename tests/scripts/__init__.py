"""Tests of the programs in scripts/, which import one another as a program's directory does."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
