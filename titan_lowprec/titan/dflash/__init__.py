"""TorchTitan's train spec ``dflash``: draft models trained on a frozen target's hidden states."""
