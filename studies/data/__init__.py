"""Data sets: catalogue, folder, downloads and loading."""
