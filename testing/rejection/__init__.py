"""What the verifier is proved against: the specification in float64, and the exact distribution of its output."""
