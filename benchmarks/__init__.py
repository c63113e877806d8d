"""Measurements of managedmem beside the bare driver call and its peers: `python -m benchmarks`."""
