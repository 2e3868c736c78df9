"""Train a drafter for a target: data that the target writes itself, and one course per kind of drafter."""
