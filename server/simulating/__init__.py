"""The decision core over a virtual clock: traces of other clusters, invented ones, and what was recorded here."""
