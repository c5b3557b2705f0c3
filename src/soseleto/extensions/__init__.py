"""What this package adds to the paper's algorithm, one idea a file."""
