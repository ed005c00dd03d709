"""Serve a calibrated predictor over HTTP with LitServe; see docs/scale.md."""
