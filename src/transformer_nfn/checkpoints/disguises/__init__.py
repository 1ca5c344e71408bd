"""Actions on single blocks, for `checkpoints.alignment` until it uses `checkpoints.symmetries`."""
