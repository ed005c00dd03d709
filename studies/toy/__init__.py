"""`python -m studies toy`: section 2 of the paper, CNML and CNMAP on points in the plane."""
