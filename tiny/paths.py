"""Where the recipe keeps its files. Everything under ``work`` is ignored by git."""

from pathlib import Path

HERE = Path(__file__).resolve().parent
WORK = HERE / "work"
PACKAGES = WORK / "packages"  # wheels and Debian packages, as downloaded
TEXT = WORK / "text"  # filtered text, one JSON Lines file a split
TOKENS = WORK / "tokens"  # token streams for training
SOURCES = HERE / "sources.json"  # name, version, sha256 and licence of every input
ASSETS = HERE.parent / "kimi_jax" / "assets" / "tiny-k2"  # the bundled model
DRAFTER = ASSETS / "drafter"
HELD_OUT = ASSETS / "heldout.json"  # token sequences for evaluation and tests
