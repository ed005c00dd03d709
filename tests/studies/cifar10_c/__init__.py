"""The CIFAR-10-C study: one run of it on a tiny network serves all tests of this folder."""
