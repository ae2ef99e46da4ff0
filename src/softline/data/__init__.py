"""Where samples come from, in which order, and with which random numbers; nothing here sees a model."""
