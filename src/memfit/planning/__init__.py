"""What a job will take, before it runs: traced, extended from few blocks, interpolated, or cached."""

from __future__ import annotations

DOOR = {
    "cache": "key_of load store",
    "card_here": "NOTICEABLE fit_command unusual_flags with_kernels_of",
    "few": "Blocks blocks_of",
    "many": "Refusal predict_many read_lines read_object",
    "on_trace": "trace_job",
    "own_code": "LineAnswer larger_of_both trace_code trace_own_code",
    "predict": "HOST_WORDS Peak Plan context_of peak_of predict tracing_more_for",
    "profile": "predict_profile",
    "pruning": "predict_whole_model_pruning traced_with",
    "traced": "HOST Traced trace_workload",
    "training": "TrainPlan decides plan_training workload_of workload_of_config",
}
"""What other rooms may use, by file."""
