"""`acnml demo`: MAP, BMA and ACNML on digits that turn away from the training data."""
