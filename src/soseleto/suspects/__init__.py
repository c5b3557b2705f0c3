"""Which source labels are probably wrong, and with what error rate."""
