"""Packed documents: sources, token cache, packers, and a loader whose state is a few integers."""
