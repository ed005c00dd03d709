"""The demo: `acnml.calibrate` and its rivals on rotated digits, in about half a minute."""
