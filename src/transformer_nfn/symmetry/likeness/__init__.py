"""How alike are two models, block by block? The stream between them, probes, scores, thresholds."""
