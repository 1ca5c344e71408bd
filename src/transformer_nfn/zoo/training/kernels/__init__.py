"""Fused kernels of the training step, in Triton and CUDA C++."""
