"""The last layer: the inner problem solved in logit space."""
