"""What runs attempts. `base` is the contract; `link` speaks to a hostd; `local` keeps one on this machine."""
