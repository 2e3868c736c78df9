"""The timed run, and the state of the machine."""
