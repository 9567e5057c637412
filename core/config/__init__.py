"""What a user may write: settings of the engine, of a request and of speculation."""
