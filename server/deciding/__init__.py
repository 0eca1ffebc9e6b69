"""What should happen next, as pure functions over a world. No I/O, no clock, no randomness, no floats."""
