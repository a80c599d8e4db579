"""Where the models that ship with the project lie."""

from pathlib import Path

TINY_HYBRID = Path(__file__).parent / "tiny-hybrid"
