"""The nouns of the design, their states and the moves between them. Pure: no I/O, no clock, no randomness."""
