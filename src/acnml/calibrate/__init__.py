"""The front door: a trained classifier and data in, calibrated probabilities and the reasons out."""
