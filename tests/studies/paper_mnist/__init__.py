"""The paper's MNIST experiments: one run of them on tiny networks serves all tests here."""
