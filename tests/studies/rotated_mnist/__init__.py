"""The rotated-MNIST study: one run of it on tiny networks serves all tests of this folder."""
