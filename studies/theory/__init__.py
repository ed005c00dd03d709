"""`python -m studies theory`: section 3.2 of the paper, its errors and bounds measured."""
