"""The benchmark: `make bench`, or `python -m bench --help`. Knows npufleet from outside only."""
