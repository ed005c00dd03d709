"""Solve z_y = z + V(e_y - softmax z_y) for every label y, in logit space."""
