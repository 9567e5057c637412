"""The engine: its parts put together, its requests stepped, what came out of them."""
