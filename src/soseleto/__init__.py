"""Source selection for target optimization (SOSELETO) for PyTorch."""
