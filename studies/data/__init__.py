"""Data sets: where they lie, how they are read, how they are shifted."""
