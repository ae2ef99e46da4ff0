"""softline: vision transformers whose attention costs O(N)."""
