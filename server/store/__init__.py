"""The only SQL. Aggregates write within a transaction they are given; `views` is the read side of every door.

Nothing here makes ids or reads a clock: both arrive as arguments.
"""
