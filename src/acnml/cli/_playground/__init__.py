"""The built page of the playground, and a server for it."""
