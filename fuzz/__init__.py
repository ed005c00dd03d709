"""A standing fuzz: generated cases, each of which must be right, refused by name, or flagged.

`python -m fuzz` runs them (`make fuzz`), and tests/integrations/test_fuzz.py runs some of every
kind. A case is a kind and a seed, so that `python -m fuzz --kind answers --seed 17` repeats one
exactly.
"""
