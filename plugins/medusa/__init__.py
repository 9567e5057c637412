"""Medusa: extra heads on the target's last hidden state, each of which drafts the token at one place ahead."""
