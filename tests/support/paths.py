"""Folders of the project, for tests that read its files or start its programs."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
TOOLS = ROOT / "tools"
