"""The small transformer in Triton: many networks at once, activations on the chip."""
