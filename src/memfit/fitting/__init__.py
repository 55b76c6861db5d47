"""What makes a job fit a card: levers, their savings and costs, ladders of settings, tables of models and cards."""

from __future__ import annotations

DOOR = {
    "claims": "estimate_memory",
    "durations": "Duration estimate estimate_training why_none with_duration",
    "emit": "check_form config_document emit_as_file headline pruning_command",
    "fit": "Fitted Option fit options",
    "forecast": "few_micro_steps_note",
    "ladder": "Ladder ladder",
    "levers": "COSTS Lever levers_for",
    "table": "GPUS MODELS Table WORKLOADS make_table",
}
"""What other rooms may use, by file."""
