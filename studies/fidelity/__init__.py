"""How close every approximation is to CNML that is retrained to convergence."""
