"""Other people's clients, test suites and load generators, run on our server: `make conformance`.

Nothing here is collected by `make test`. `suites.py` is the list of the tools, and `checks/` has one file for each. A
check runs in a private environment of its tool below build/third-party/, so it does not import paceline.
docs/conformance-suites.md tells what applies and what does not.
"""
