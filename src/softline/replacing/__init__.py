"""Attention of softline in vision transformers of other libraries."""
