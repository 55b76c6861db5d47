"""Which model: presets, folders, config files and factories become a `transformers` config, then a module.

Importing this package costs nothing: torch and transformers are imported inside the functions that need them.
"""
