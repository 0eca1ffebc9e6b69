"""The page for people; server-rendered."""
