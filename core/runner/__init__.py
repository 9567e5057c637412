"""The engine's runner: scheduling, paged KV, attention, the target model, and one step."""
