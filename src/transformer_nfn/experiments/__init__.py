"""Protocol, runs, the paper's tables and figures, the report."""
