"""A proposer in a process of its own, which drafts for engines elsewhere. Both speak `specdec.sdk.wire`."""
