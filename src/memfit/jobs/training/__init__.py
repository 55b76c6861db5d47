"""`memfit train`: a config, its data, the model, the loop, recovery from out of memory, checkpoints, the result."""

from __future__ import annotations

DOOR = {
    "batch": "BatchSizes divisors is_first launched processes processes_meant resolve_batch",
    "checkpoints": "check_checkpoint check_whole processes_of steps_done",
    "chunked_loss": "IGNORED use_chunked_loss",
    "config": "BatchConfig DataConfig FACTORY KEYS ModelConfig TrainConfig keys_of",
    "config_file": "SECTIONS as_yaml canonical config_from dump find_config key_called load_config parse_yaml "
    "refuse_python",
    "config_names": "LOOSE OPTIMIZERS SECTION_ALIASES TRAINER_NAMES",
    "data": "Collator TrainingData epoch_order read_training_data rows_of_full_length",
    "engine": "PROBE_STEPS",
    "examples": "BYTES ByteTokenizer Examples is_on_hub pad_id_of read_examples source_of tokenise",
    "foreign_weights": "load_weights",
    "job": "EarlierRun TrainJob check_output find_beginning note_on_weights notes_on_data prepare_job",
    "loops": "run_memfit run_trainer trainer_settings training_config training_job",
    "offload": "host_memory_by use_block_levers",
    "optimizers": "managed_bytes optimizer_of",
    "parallel": "is_made_without_memory one_process_of to_device without_reduction",
    "refusals": "NEEDS_BITSANDBYTES check_engine check_offload missing_gpu missing_packages",
    "result": "PHASES RunLog TrainEvent TrainResult in_a_line",
    "run": "train",
    "shapes": "POSITIONS VOCABULARY basics_config gsa_config model_config number_in shape_of",
}
"""What other rooms may use, by file."""
