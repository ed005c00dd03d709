"""`acnml demo`: MAP, BMA and ACNML on rotated digits."""
