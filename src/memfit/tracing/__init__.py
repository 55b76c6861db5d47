"""`trace(fn)`: what any callable would allocate on a GPU, found without one. Knows no model and no job."""

from __future__ import annotations

DOOR = {
    "answers": "Answer Answers asking_line GENERATED NO_OVERFLOW Site Value",
    "autocast": "Autocast LAYER",
    "costs": "OpCosts",
    "distributed": "OnHost ddp_traced fully_shard_traced",
    "held": "noting_what_is_held",
    "outside": "LEFT_OUT nothing_saved put_back settings_of_a_new_process what_is_around",
    "own_code": "OwnCodeNames OwnCodeTracer",
    "pretended_card": "CUDA_VERSION RANDOM_STATE_BYTES card_pretended",
    "processes": "processes_pretended",
    "python_stacks": "keeping_stacks",
    "repeated.passes": "CallDiffers repeated_calls_skipped",
    "rule_answers": "answers_on",
    "stored": "SavedThings files_read_as_shapes large_weights_without_memory without_memory",
    "unknown": "UnknownWhole is_unknown mathematics_of_unknown_numbers",
    "tracer": "ONE_AT_A_TIME Tracer check_not_nested run_traced trace",
}
"""What other rooms may use, by file."""
