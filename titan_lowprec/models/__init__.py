"""Models that the project trains beside TorchTitan's own; free of TorchTitan."""
