"""`make bench`: the run time of each method, compared with a forward pass and the paper's loop."""
