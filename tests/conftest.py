"""One thread: the tensors are tiny, and more threads only wait for each other."""

import torch

torch.set_num_threads(1)
