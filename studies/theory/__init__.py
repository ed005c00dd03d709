"""`python -m studies theory`: section 3.3 of the paper, its errors and bounds measured."""
