"""Llama 3 with low-precision attention over packed documents."""
