"""Figures about the records: their current state and size."""
