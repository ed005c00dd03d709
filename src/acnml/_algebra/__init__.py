"""Linear algebra of posteriors and kernels; knows no model and no data. Private."""
