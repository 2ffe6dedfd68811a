"""The TorchTitan 0.2.2 adapter: the only room that imports TorchTitan."""
