"""The command line: options in, one call of the Python API, one call of a renderer. No arithmetic here."""
