"""Serve a calibrated predictor over HTTP with LitServe; see docs/howto/serve.md."""
