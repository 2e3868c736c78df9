"""Which drafter, γ and tree are best here."""
