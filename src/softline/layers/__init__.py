"""Building blocks other than attention operators: embeddings, token grids, windows, landmarks, local convolutions."""
