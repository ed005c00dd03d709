"""Small helpers of the library: parameters by name, batches, checks, seeding, progress. Private."""
