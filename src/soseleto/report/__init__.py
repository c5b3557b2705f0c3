"""From a run folder's files to one HTML page that opens offline; nothing here knows the code that trained."""

from soseleto.report.html import render, write_report

__all__ = ["render", "write_report"]
