"""The TorchTitan 0.2.2 adapter: configuration, train specs, trainer. The only room that imports it."""
