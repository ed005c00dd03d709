"""Private helpers: named parameters, batches, checks, seeding, progress bars."""
