"""The training step in C, for the CPU."""
