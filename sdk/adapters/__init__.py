"""Proposers inside other engines, and theirs inside ours. Nothing else imports these modules."""
