"""The engine itself: nothing in it knows images."""
