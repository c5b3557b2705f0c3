"""The report of a run: one self-contained HTML page, made from the run folder's files alone."""

from soseleto.report.html import render, write_report

__all__ = ["render", "write_report"]
