"""DFlash draft models: a block of tokens in one pass, from the target's hidden states."""
