"""Conclusions from what was observed: digests, detectors, verdicts. Pure."""
