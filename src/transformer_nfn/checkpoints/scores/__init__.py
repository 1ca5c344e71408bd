"""Scores of two checkpoints that every disguise leaves unchanged, and the verdict on them."""
