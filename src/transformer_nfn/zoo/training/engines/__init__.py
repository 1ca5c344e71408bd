"""Who does the work of a build."""
