"""The rotated-MNIST study: what classifiers say of digits that turn away from what they know."""
