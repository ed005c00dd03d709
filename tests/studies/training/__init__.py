"""Training: against SGD written out, interrupted anywhere, in two processes."""
