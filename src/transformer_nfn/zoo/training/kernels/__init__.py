"""Fused Triton kernels of the training step."""
