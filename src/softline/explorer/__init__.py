"""The explorer: a page in the browser that shows what two models look at, side by side."""
