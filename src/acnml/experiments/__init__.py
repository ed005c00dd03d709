"""Studies that show what the library does: data, training, measurements, figures, reports."""
