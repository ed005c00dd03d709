"""What studies share beside the pipeline: artefacts, choices, tables and pieces of a page."""
