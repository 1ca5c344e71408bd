"""What computes a training step: compiled C on a CPU, Triton kernels on a GPU."""
