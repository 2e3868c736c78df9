"""Drafters that choose among other drafters: `auto` and `portfolio`."""
