"""The tables and figures of the paper, with all their rivals: ``python -m experiments``."""
