"""The explorer: a page in the browser that shows the attention of two models side by side."""
