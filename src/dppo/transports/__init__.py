"""Where actors run, and how questions reach them."""
