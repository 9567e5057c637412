"""Requests on their way: tokens, text, what a step did to them, and what they count."""
