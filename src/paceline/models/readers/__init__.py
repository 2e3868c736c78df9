"""Readers with special needs: strict shapes, early exit, guidance, sequences of a drafter."""
