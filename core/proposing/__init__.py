"""The proposer's host: every call of a proposer, what it is shown, and where its drafts are kept."""
