"""Training as in the SWAG paper: against SGD written out, broken off anywhere, in two processes."""
