"""The pipeline: keys, records, what is made again and what is not, times, reports, kills."""
