"""Corruptions against literal oracles, and what is true of all of them."""
