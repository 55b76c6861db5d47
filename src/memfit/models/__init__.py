"""Which models there are, and how one is built or read from its files."""

from __future__ import annotations

DOOR = {
    "basics": "BasicsSettings",
    "checkpoint": "INDEX MissingWeights StoredTensor WEIGHTS WeightStore read_header",
    "config_check": "MAX_FILE_BYTES MAX_LAYERS PRECISIONS read_config without_doubles",
    "files": (
        "NotHere Source bytes_to_fetch cache_folder find_here find_source find_tokenizer_here first_line "
        "load_tokenizer look_at_source tokenizer_folder why_no_hub"
    ),
    "gguf": "gguf_file",
    "gsa": "GsaConfig GsaForCausalLM",
    "heads": "HEAD_NAMES Head as_language_model picture",
    "pipelines": "is_shipped pipelines",
    "presets": (
        "BASICS BasicsConfig GATHER GSA_SETTINGS GSA_SIZES GSA_TYPE LATER_SIZES NOT_COMPARED Preset SIZES encoders "
        "find_preset is_basics is_gsa presets variants"
    ),
    "registry": (
        "ModelSource block_list build_from_config build_model head_named is_encoder language_model load_config "
        "make_known names_code parameter_count refuse_code resolve source_notes stored_type"
    ),
    "stored_weights": "StoredWeights facts_of refuse_stored stored_weights",
}
"""What other rooms may use, by file."""
