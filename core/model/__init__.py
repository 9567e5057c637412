"""The target model: a library model made ready to run ragged batches over a paged cache."""
