"""A trained model in use: predictions, calibration, loading and export."""
