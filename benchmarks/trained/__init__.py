"""Small language models that are really trained, for benchmarks that need relatives."""
