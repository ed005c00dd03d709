"""`make bench`: what each method costs, beside a forward pass and the paper's loop."""
