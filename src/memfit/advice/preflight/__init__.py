"""The pre-flight: machine, settings, config, model and plan, looked at before hours are spent."""
