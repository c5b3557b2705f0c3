"""Methods that wrap another method: skip non-finite steps, stop early, record signals."""
