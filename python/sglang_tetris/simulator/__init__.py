"""Replays recorded drafts against any policy and cost table; pure, needs only core."""
