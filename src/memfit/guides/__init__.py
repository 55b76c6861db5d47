"""The documents that memfit replaces: what they claim, and what is so."""

from __future__ import annotations

DOOR = {
    "claims": "DECISIONS EXAMPLES GB QUICK_REFERENCE QuickReference SAVINGS",
    "estimate_memory": "estimate_memory",
    "profile_suite": "PARTS Suite predict_profile",
    "verdicts": "CheckedClaim CheckedSaving beside_weights check_claim check_saving difference",
    "whole_model": "Plans STREAMED WHOLE WholeModel whole_model",
    "whole_model_pruning": "predict_whole_model_pruning",
}
"""What other rooms may use, by file."""
