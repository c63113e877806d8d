"""What ``python -m managedmem`` does; ``import managedmem`` does not load it."""
