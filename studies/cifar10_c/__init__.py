"""The paper's study of CIFAR-10 and CIFAR-10-C."""
