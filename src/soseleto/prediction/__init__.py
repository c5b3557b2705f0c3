"""Trained models: prediction, calibration, loading and export."""
