"""Data sets: the catalogue, what the data folder holds, idx files, rotations, the fallback."""
