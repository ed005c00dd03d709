"""Downloads from a web site of our own: broken connections, wrong files, mirrors, archives."""
