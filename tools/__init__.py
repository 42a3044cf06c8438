"""Programs for users. Those of `proofs/` and `bill/` run here, too, by their old names."""

from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
__path__ = [*__path__, str(_ROOT / "proofs"), str(_ROOT / "bill")]
