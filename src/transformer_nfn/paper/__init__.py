"""The paper's tables, its numbers and ours beside them, its figures."""
