"""What a job will take, before it runs: traced, extended from few blocks, interpolated, or cached."""

from __future__ import annotations

DOOR = {
    "cache": "Key key_of load store",
    "card_here": "NOTICEABLE fit_command unusual_flags with_kernels_of",
    "failures": "failures_of_the_job",
    "few": "Blocks blocks_of",
    "host_facts": "HOST WORDS",
    "many": "Refusal predict_many read_lines",
    "on_trace": "prepare_without_memory trace_job",
    "own_code": "trace_own_code",
    "predict": (
        "Plan SAFE_SHARE SMALLEST_PRECISION Verdict assess capacity_for context_of context_on limit_note predict "
        "pruning_guides"
    ),
    "pruning": "ANSWERS PruningPhases label traced_with within_positions",
    "traced": "Traced trace_workload",
    "training": "TrainPlan decides plan_training workload_of workload_of_config",
}
"""What other rooms may use, by file."""
