"""Everything that knows requests and responses: between the entry points and the engine."""
