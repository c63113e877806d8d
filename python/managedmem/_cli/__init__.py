"""The commands of ``python -m managedmem``; ``import managedmem`` does not load them."""
