"""The engine for posteriors over any layers: every row at weights of its own. Private."""
