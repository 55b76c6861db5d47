"""How long predictions take: `make bench`, or `python -m benchmarks --help`."""
