"""The commands of ``managedmem``; ``import managedmem`` does not load them."""
