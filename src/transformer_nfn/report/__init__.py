"""The report: one self-contained page about any number of runs."""

from transformer_nfn.report.page import write_report

__all__ = ["write_report"]
