"""Every drafter family as a plain torch module: names and shapes as published, forward written from the papers."""
