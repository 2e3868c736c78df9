"""What takes part in a benchmark: Paceline runs, and pairs with a given acceptance rate."""
