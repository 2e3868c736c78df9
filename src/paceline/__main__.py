"""`python -m paceline`."""

from paceline.cli.main import main

if __name__ == "__main__":
    main()
