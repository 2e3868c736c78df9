"""The promise, tested: one suite over every registered drafter and rule. See README.md beside this file."""
