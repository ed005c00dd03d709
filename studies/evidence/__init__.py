"""What does calibration under shift gain, and by which method? Compared at equal price."""
