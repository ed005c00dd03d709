"""Run torch with one thread, because the tensors are too small to benefit from more."""

import torch

torch.set_num_threads(1)
