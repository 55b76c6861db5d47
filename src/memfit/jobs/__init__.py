"""The jobs that memfit plans and does: their settings, how they are prepared, how they run."""

from __future__ import annotations

DOOR = {
    "adapters": "config_arguments",
    "build": "Prepared build_base_model build_for_training prepare_without_memory takes_labels",
    "host": "Event HostMemory Lane as_bytes cause_of finished is_out_of_memory numbers on_the_host",
    "listener": "Listener",
    "loading": "loaded_bytes",
    "profile": "BATCH_SIZE CONTEXT_LENGTH OnCard ProfileSettings Profiled check_gpu course_size profile_on_gpu",
    "quantised": "DTYPES",
    "run": "Phases put_on run_job token_ids wanted",
    "settings": (
        "ALIASES AS_IN_QLORA BEYOND_BLOCKS BY_BITSANDBYTES Checkpointing HELP KINDS MAX_SEQ_LEN NO_TARGETS "
        "PRUNE_METHODS QLORA Sparsity TRAININGS WITHOUT_BACKWARD as_json check_by_type check_one_of check_seed "
        "check_setting flag kinds_that_read plain_name plain_value setting_types split_names without_none"
    ),
    "stored": "as_stored",
    "text_files": "KINDS builtin_documents builtin_origin is_text_file read_rows",
    "texts": "Texts check_packages fetch_file find_split find_texts is_on_this_machine",
    "together": "check_compiled check_inputs check_quantised unused without_effect",
    "workload": "NO_MODEL Workload settings_of",
}
"""What other rooms may use, by file."""
