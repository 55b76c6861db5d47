"""One job at many batch sizes and lengths: after a few traces the others are told from those, to the byte."""

from __future__ import annotations

DOOR = {
    "family": "Family Interpolation family_of point_of",
}
"""What other rooms may use, by file."""
