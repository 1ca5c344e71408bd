"""Training of the networks of a zoo: tasks, grid, trainer, engines, kernels."""
