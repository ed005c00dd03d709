"""Private helpers: named parameters, batches, checks, files, memory, seeding, progress bars."""
