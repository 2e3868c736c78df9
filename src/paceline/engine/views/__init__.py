"""A finished text for people: its tokens by round, the ribbon, the staircase and the page."""
