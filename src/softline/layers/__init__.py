"""Parts of blocks that are not attention operators: local convolutions, landmark sampling, token grids."""
