"""The report of the quick start: one HTML page that needs no other file."""
