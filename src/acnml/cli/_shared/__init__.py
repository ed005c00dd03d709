"""What the demo and the studies share: pages, figures, the terminal, files and digits."""
