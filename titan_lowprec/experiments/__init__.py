"""Sweeps: a matrix of settings becomes runs, and the runs become a table with a verdict per arm."""
