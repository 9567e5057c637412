"""From a recording to a trained head: data in the formats of trainers, and what a head has learnt of it."""
