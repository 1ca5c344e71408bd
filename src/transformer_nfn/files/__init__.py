"""Bytes in and out: checkpoints, whole-file writes, the cache, downloads, named assets."""
