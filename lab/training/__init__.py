"""Train a head from a recording: data in the formats of trainers, and how well a head agrees with it."""
