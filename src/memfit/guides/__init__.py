"""The five documents that memfit answers: their titles, commands, claims, formulas and files."""

from __future__ import annotations

DOOR = {
    "claims": (
        "DECISIONS EXAMPLES GB QUICK_REFERENCE RUNGS SAVINGS Claim QuickReference RuleOfThumb Saving pruning_formulas "
        "rule_of_thumb"
    ),
    "profile_suite": "PARTS Suite",
}
"""What other rooms may use, by file."""
