"""Models with random weights, and pairs with a given acceptance rate."""
