"""Calls of a model that do again what calls before them did: not run, but told."""

from __future__ import annotations

DOOR = {"passes": "CallDiffers repeated_calls_skipped"}
"""What other rooms may use, by file."""
