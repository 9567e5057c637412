"""One proposer in a process of its own, which drafts for engines elsewhere. They speak `specdec.sdk.wire`."""
